"""Workers with flow control in one process and one event loop: real segments, areas, eventfds and wiring; streams without a network.

There are no other processes: the test does the supervisor's work (table, objectives). Use it inside a running loop.
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
from shm.prefix_writer import IndexWriter
from shm.table import Handle, State, TableWriter
from tests.pair import Envoy, FakeStream
from tests.reports import Reports
from tests.workers.instances import made
from tests.workers.supervisor.folders import FolderWatch
from workers.process.instance import Instance
from workers.shared.bus import BusWriter
from workers.shared.documents import ENDPOINTS, EndpointRecord, encode
from workers.shared.objectives import static_bands
from workers.worker.adoption import Adoption
from workers.worker.extproc.stream import PATH, open_stream
from workers.worker.flow.flow_control import FlowControl
from workers.worker.main import Worker

ONE_AT_A_TIME = "{type: concurrency-detector, parameters: {maxConcurrency: 1}}"
OBJECTIVE = "x-llm-d-inference-objective"


def config(section: str = "", *plugins: str, gate: bool = True, detector: str = "concurrency-detector") -> str:
    """A configuration in which one request per endpoint fills the pool, unless `detector` names another of `plugins`."""
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


def rewrite(model: str, target: str) -> str:
    """An InferenceModelRewrite that requests `target` instead of `model`."""
    rule = f"{{matches: [{{model: {{type: Exact, value: {model}}}}}], targets: [{{modelRewrite: {target}}}]}}"
    return (
        "apiVersion: llm-d.ai/v1alpha2\nkind: InferenceModelRewrite\nmetadata: {name: r}\n"
        f"spec: {{poolRef: {{name: pool}}, rules: [{rule}]}}\n"
    )


class Shard:
    """The parts of one worker that handle streams and flow control."""

    def __init__(self, instance: Instance, index: int) -> None:
        self.index = index
        self.instance = instance
        self.asked: list[SentRequest] = []
        self.worker = Worker(instance, index)
        counter = self.worker.area.schema.counter
        bus = self.bus = BusWriter(
            instance.pipes.bus_writers[index],
            partial(self.worker.area.add, counter["bus_drops_total"]),
            partial(self.worker.area.add, counter["bus_frames_total"]),
        )
        self.worker.set_up(bus)
        adoption = self.worker._adoption
        assert isinstance(adoption, Adoption)
        self.parts = adoption.parts
        self.app = self.parts.app
        instance.memory.areas.set_serving(index + 1, True)
        self.worker.area.heartbeat(time.monotonic())
        loop = asyncio.get_running_loop()
        loop.add_reader(instance.pipes.wakeups[index], self.worker.woken, loop)

    @property
    def flow(self) -> FlowControl:
        assert self.parts.flow is not None
        return self.parts.flow

    def ask(self, name: str = "r", objective: str = "", body: bytes | None = None, **headers: str) -> "SentRequest":
        """Send a request with its whole body. It has its answer afterwards, or waits."""
        asked = SentRequest(self, name, objective, body or json.dumps({"model": "m", "prompt": name}).encode(), headers)
        self.asked.append(asked)
        return asked

    def counter(self, name: str) -> int:
        return self.worker.area.counters[self.worker.area.schema.counter[name]]

    def close(self) -> None:
        for asked in self.asked:
            asked.end()
        asyncio.get_running_loop().remove_reader(self.instance.pipes.wakeups[self.index])
        self.bus.flush()
        if self.parts.flow is not None:
            self.parts.flow.close()
        self.instance.memory.areas.set_serving(self.index + 1, False)


class SentRequest:
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
        """Whether the request has got an endpoint."""
        return self.envoy.handler.response_phase is not None

    @property
    def refused(self) -> tuple[int, str] | None:
        """Status and drop reason; None if the request was not refused."""
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
        """End the stream, as after the model server's answer or a disconnect of the client."""
        self.envoy.handler.closed()


class World:
    """An instance with endpoints, objectives and shards."""

    def __init__(self, instance: Instance, folder: Path) -> None:
        self.instance = instance
        self.folder = folder
        self.reports = Reports()
        self._table = TableWriter(instance.layout.table, instance.memory.table)
        self._documents = DocumentWriter(instance.layout.documents, instance.memory.documents)
        self._index = IndexWriter(instance.layout.index, instance.memory.index)
        self._records: list[EndpointRecord] = []
        self.shards: list[Shard] = []
        self.watch = FolderWatch(
            str(folder) if instance.options.objects_dir else "",
            DocumentReader(instance.layout.documents, instance.memory.documents),
            DocumentWriter(instance.layout.documents, instance.memory.documents),
            static_bands(instance.config.flow),
            instance.memory.flow,
            report=self.reports,
            now=time.monotonic,
        )
        self.watch.start(successor=False)

    def endpoint(self, name: str = "a", **labels: str) -> EndpointRecord:
        handle = self._table.take(self._index.new_owner(), lambda slot: True)
        assert handle is not None
        self._write(handle, State.FRESH)
        self._table.publish()
        record = EndpointRecord("default", name, "10.0.0.1", 8000 + len(self._records), labels, *handle, 0)
        self._records.append(record)
        self._documents.write(ENDPOINTS, encode(self._records))
        return record

    def mark_all(self, state: State) -> None:
        """Set the state of all endpoints."""
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
            values=[0.0] * len(self.instance.layout.table.columns),
            present=0,
        )

    def remove_all(self) -> None:
        """Remove all endpoints."""
        for handle in self._table.taken():
            self._table.release(handle)
        self._records.clear()
        self._documents.write(ENDPOINTS, encode(self._records))
        self._table.publish()

    def shard(self) -> Shard:
        shard = Shard(self.instance, len(self.shards))
        self.shards.append(shard)
        return shard


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
    """One endpoint that serves one request at a time, and `workers` workers."""
    folder = tmp_path / "objects"
    folder.mkdir(exist_ok=True)
    for name, priority in (objectives or {}).items():
        (folder / f"{name}.yaml").write_text(objective(name, priority))
    options = {"objects_dir": str(folder)} if objectives is not None else {}
    os.makedirs(tmp_path / "run", exist_ok=True)
    with made(tmp_path / "run", config(section, *plugins, gate=gate, detector=detector), workers=max(2, shards), **options) as instance:
        world_ = World(instance, folder)
        world_.endpoint()
        for _ in range(shards):
            world_.shard()
        try:
            yield world_
        finally:
            for shard in world_.shards:
                shard.close()
