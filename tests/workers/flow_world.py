"""Workers with flow control in one process and one loop: real segments, lanes, eventfds and wiring; streams without a network.

The supervisor's part (table, objectives) is the test's; there are no other processes. Used inside a running loop.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

from shm.documents import DocumentReader, DocumentWriter
from shm.prefix_index import IndexWriter
from shm.table import Handle, State, TableWriter
from tests.pair import Envoy, FakeStream
from tests.workers.instances import made
from workers.bus import BusWriter
from workers.documents import ENDPOINTS, EndpointRecord, encode
from workers.flow import FlowControl
from workers.instance import Instance
from workers.objectives import static_bands
from workers.objects_watch import ObjectsWatch
from workers.server import PATH, open_stream
from workers.worker import Worker

ONE_AT_A_TIME = "{type: concurrency-detector, parameters: {maxConcurrency: 1}}"
OBJECTIVE = "x-llm-d-inference-objective"


def config(section: str = "", *plugins: str, gate: bool = True, detector: str = "concurrency-detector") -> str:
    """A configuration whose pool is full with one request, unless another of `plugins` is to detect that."""
    gates = "featureGates: [flowControl]\n" if gate else ""
    listed = ", ".join((ONE_AT_A_TIME, "{type: round-robin-fairness-policy}", "{type: random-picker}", *plugins))
    band = "defaultPriorityBand: {fairnessPolicyRef: round-robin-fairness-policy}, " if gate else ""
    return (
        f"{gates}plugins: [{listed}]\n"
        "schedulingProfiles: [{name: p, plugins: [{pluginRef: random-picker}]}]\n"
        f"flowControl: {{{band}saturationDetector: {{pluginRef: {detector}}}{', ' if section else ''}{section}}}\n"
    )


def objective(name: str, priority: int) -> str:
    return f"apiVersion: llm-d.ai/v1alpha2\nkind: InferenceObjective\nmetadata: {{name: {name}}}\nspec: {{priority: {priority}}}\n"


class Shard:
    """One worker, as far as flow control and streams go."""

    def __init__(self, instance: Instance, index: int) -> None:
        self.index = index
        self.instance = instance
        self.asked: list[Asked] = []
        self.worker = Worker(instance, index)
        counter = self.worker.lane.schema.counter
        bus = BusWriter(
            instance.bus_writers[index],
            partial(self.worker.lane.add, counter["bus_drops_total"]),
            partial(self.worker.lane.add, counter["bus_frames_total"]),
        )
        self.app = self.worker._app(bus)
        instance.lanes.set_serving(index + 1, True)
        self.worker.lane.beat(time.monotonic())
        loop = asyncio.get_running_loop()
        loop.add_reader(instance.wakeups[index], self.worker._woken, loop)

    @property
    def flow(self) -> FlowControl:
        assert self.app.flow is not None
        return self.app.flow

    def ask(self, name: str = "r", objective: str = "", body: bytes | None = None, **headers: str) -> "Asked":
        """A request whose body has come; it has its answer, or waits."""
        asked = Asked(self, name, objective, body or json.dumps({"model": "m", "prompt": name}).encode(), headers)
        self.asked.append(asked)
        return asked

    def counter(self, name: str) -> int:
        return self.worker.lane.counters[self.worker.lane.schema.counter[name]]

    def close(self) -> None:
        for asked in self.asked:
            asked.end()
        asyncio.get_running_loop().remove_reader(self.instance.wakeups[self.index])
        if self.app.flow is not None:
            self.app.flow.close()
        self.instance.lanes.set_serving(self.index + 1, False)


class Asked:
    """One stream."""

    def __init__(self, shard: Shard, name: str, objective: str, body: bytes, headers: dict[str, str]) -> None:
        self.name = name
        self.stream = FakeStream()
        handler = open_stream(shard.app, PATH, (), self.stream)
        assert handler is not None
        self.envoy = Envoy(handler, self.stream)
        more = {OBJECTIVE: objective} if objective else {}
        self._answers: list[Any] = self.envoy.headers(
            **{"x-request-id": name, **more, **{k.replace("_", "-"): v for k, v in headers.items()}}
        )
        self._answers += self.envoy.body(body)

    @property
    def answers(self) -> list[Any]:
        self._answers += self.envoy.answers()
        return self._answers

    @property
    def waits(self) -> bool:
        return not self.sent and self.stream.ended is None

    @property
    def sent(self) -> bool:
        """It has an endpoint."""
        return self.envoy.handler._decision is not None

    @property
    def refused(self) -> tuple[int, str] | None:
        """Status and drop reason."""
        for answer in self.answers:
            if answer.HasField("immediate_response"):
                immediate = answer.immediate_response
                headers = {h.header.key: h.header.raw_value.decode() for h in immediate.headers.set_headers}
                return immediate.status.code, headers.get("x-llm-d-request-dropped-reason", "")
        return None

    def header(self, name: str) -> str:
        for answer in self.answers:
            for each in answer.immediate_response.headers.set_headers:
                if each.header.key == name:
                    return str(each.header.raw_value.decode())
        return ""

    def end(self) -> None:
        """The model server's answer, or the client's end."""
        self.envoy.handler.closed()


class World:
    """An instance with endpoints, objectives and shards."""

    def __init__(self, instance: Instance, folder: Path) -> None:
        self.instance = instance
        self.folder = folder
        self.reports: list[str] = []
        self._table = TableWriter(instance.table_schema, instance.table)
        self._documents = DocumentWriter(instance.document_schema, instance.documents)
        self._index = IndexWriter(instance.index_schema, instance.index)
        self._records: list[EndpointRecord] = []
        self.shards: list[Shard] = []
        self.watch = ObjectsWatch(
            str(folder) if instance.options.objects_dir else "",
            DocumentReader(instance.document_schema, instance.documents),
            DocumentWriter(instance.document_schema, instance.documents),
            static_bands(instance.config.flow),
            instance.flow_lanes,
            report=self.reports.append,
            now=time.monotonic,
        )
        self.watch.start(successor=False)

    def endpoint(self, name: str = "a", **labels: str) -> EndpointRecord:
        handle = self._table.claim(self._index.new_owner(), lambda slot: True)
        assert handle is not None
        self._write(handle, State.FRESH)
        self._table.publish()
        record = EndpointRecord("default", name, "10.0.0.1", 8000 + len(self._records), labels, *handle, 0)
        self._records.append(record)
        self._documents.write(ENDPOINTS, encode(self._records))
        return record

    def mark_all(self, state: State) -> None:
        """What is known of the endpoints' metrics from now on."""
        for record in self._records:
            self._write(Handle(record.slot, record.generation), state)
        self._table.publish()

    def _write(self, handle: Handle, state: State) -> None:
        self._table.write(
            handle,
            state=state,
            flags=0,
            updated_at=time.monotonic(),
            inflight_at_scrape=0,
            values=[0.0] * len(self.instance.table_schema.columns),
            present=0,
        )

    def remove_all(self) -> None:
        """No endpoint is left."""
        for handle in self._table.claimed():
            self._table.release(handle)
        self._records.clear()
        self._documents.write(ENDPOINTS, encode(self._records))
        self._table.publish()

    def shard(self) -> Shard:
        made_ = Shard(self.instance, len(self.shards))
        self.shards.append(made_)
        return made_


@contextlib.asynccontextmanager
async def world(
    tmp_path: Path,
    section: str = "",
    *plugins: str,
    objectives: dict[str, int] | None = None,
    shards: int = 1,
    gate: bool = True,
    detector: str = "concurrency-detector",
) -> AsyncIterator[World]:
    """One endpoint that serves one request at a time, and some workers."""
    folder = tmp_path / "objects"
    folder.mkdir(exist_ok=True)
    for name, priority in (objectives or {}).items():
        (folder / f"{name}.yaml").write_text(objective(name, priority))
    given = {"objects_dir": str(folder)} if objectives is not None else {}
    os.makedirs(tmp_path / "run", exist_ok=True)
    with made(
        tmp_path / "run", config(section, *plugins, gate=gate, detector=detector), workers=max(2, shards), **given
    ) as instance:
        world_ = World(instance, folder)
        world_.endpoint()
        for _ in range(shards):
            world_.shard()
        try:
            yield world_
        finally:
            for shard in world_.shards:
                shard.close()


async def until(condition: Any, seconds: float = 2.0) -> None:
    """Lets the loop turn until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.001)
