"""Writes recordings in virtual time through the code of workers and supervisor: the recorder, packets of the bus, frames, files."""

import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from epp.candidates import Endpoint
from epp.data import CACHE_TOKENS, RUNNING, WAITING
from epp.decision.decision import Decision, Usage
from epp.decision.pipeline import Pipeline
from epp.recording.batches import Assembler
from epp.recording.keys import Keyed
from epp.recording.records import VERSION, Member, Opened, Record, Scraped, batch, frame
from epp.request import Request
from shm.series import FIRST_BLOCK
from tests.pair import Series
from workers.shared.recording import FRAME_BYTES, Frame, Limits
from workers.shared.recording.files import RecordFiles
from workers.transport.interface import Clock
from workers.worker.telemetry.recorder import Recorder, RecordSender
from workers.worker.telemetry.request_metrics import Cell, Exchange

SECRET = 7
FRAME_S = 1.0
COLUMNS = [RUNNING.name, WAITING.name, CACHE_TOKENS.name]
QUEUE_FULL_S = 0.002


class Writer:
    """One recording, as one worker and the supervisor write it. Times are virtual seconds."""

    def __init__(self, folder: Path, endpoints: Sequence[Endpoint]) -> None:
        self._files = RecordFiles(str(folder), "bench", Limits())
        self._assembler = Assembler()
        self._sender = RecordSender(0, self._offer, self._lost)
        self._sender.use(1)
        self._recorder: Recorder
        self._clock = Clock(0.0)
        self._metrics = Series(self._clock).metrics
        self._batches: list[bytes] = []
        self._records = 0
        self._framed_at = 0.0
        self._record([Opened(VERSION, "bench", 1, time.time(), 0.0, SECRET)])
        self._record([self._member(endpoint, 0.0, joined=True) for endpoint in endpoints])

    def use(self, pipeline: Pipeline) -> None:
        """Records the decisions of this pipeline."""
        self._recorder = Recorder(self._sender, Keyed(SECRET), generation=1, config_hash="bench", pipeline=pipeline)

    def decided(self, request: Request, decision: Decision, at: float, now: float) -> int:
        """Records a decision. Returns the number of the request."""
        return self._recorder.decided(request, decision, at, now)

    def ended(self, number: int, slot: int, at: float, first_s: float, now: float, usage: Usage | None, status: int = 200) -> None:
        """Records the end of a request. `first_s`: NaN if there was no answer."""
        exchange = Exchange(self._metrics, Cell(0, 0, FIRST_BLOCK), at, 0)
        exchange.usage, exchange.recorded, exchange.streaming, exchange.whole = usage, number, True, status == 200
        if not math.isnan(first_s):
            self._clock.now = at + first_s
            exchange.chunk(1)
        decision = Decision([Endpoint(name="", namespace="", host="127.0.0.1", port=1, slot=slot)], {}, "default")
        self._recorder.ended(exchange, Request(id="", path="", headers={}, now=now), decision, status, now)

    def scraped(self, now: float, rows: Sequence[Sequence[float]], states: Sequence[int]) -> None:
        """Records the values of all endpoints, in the order of COLUMNS, and passes on what is due."""
        slots = np.arange(len(rows), dtype="<i8")
        values = np.array(rows, dtype="<f8")
        times = np.full(len(rows), now, dtype="<f8")
        self._record([Scraped(now, COLUMNS, slots.tobytes(), times.tobytes(), values.tobytes(), bytes(states))])
        if now - self._framed_at >= FRAME_S or sum(map(len, self._batches)) >= FRAME_BYTES:
            self._framed_at = now
            self._frame()

    def member(self, endpoint: Endpoint, at: float, *, joined: bool) -> None:
        """Records that an endpoint joins or leaves."""
        self._record([self._member(endpoint, at, joined=joined)])

    def end(self) -> None:
        self._frame()
        self._files.end()
        assert not self._files.lost, self._files.why

    def _member(self, endpoint: Endpoint, at: float, *, joined: bool) -> Member:
        address = f"{endpoint.host}:{endpoint.port}"
        return Member(
            at, joined, endpoint.slot, endpoint.generation, endpoint.namespace, endpoint.name, address, dict(endpoint.labels)
        )  # fmt: skip

    def _record(self, records: list[Record]) -> None:
        self._sender.flush()
        self._batches.append(batch(records))
        self._records += len(records)

    def _offer(self, packet: bytes) -> bool:
        whole = self._assembler.take(packet)
        if whole is not None:
            self._batches.append(whole.data)
            self._records += whole.records
        return True

    def _lost(self, records: int) -> None:
        raise AssertionError(f"{records} records were lost")

    def _frame(self) -> None:
        self._sender.flush()
        if not self._batches:
            return
        made = Frame(1, frame(self._batches), self._records)
        while not self._files.put(made):
            time.sleep(QUEUE_FULL_S)
        self._batches, self._records = [], 0
