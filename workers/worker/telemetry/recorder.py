"""Records requests for `epp record` and --record-dir: encodes decisions and the ends of requests, and sends them to the supervisor.

    decided, ended ─▶ waiting records ── WAITING_MAX together, or each heartbeat ─▶ one buffer per worker ─▶ bus ─▶ supervisor, which writes

A record is encoded once, from a tuple in the order of the fields in `epp.recording.records`. Records wait and are encoded together, because
then code and data are in the CPU's caches. A worker never waits: if the bus is full, it drops the batch and counts its records. Without a
recording, a request costs one comparison.

The supervisor shows the number of the file that it writes as a gauge in its area; it is negative if only a sample of the requests is
recorded (`epp.recording.sample`). The worker looks at each heartbeat. If the number has changed, the worker begins anew: it describes its
endpoints again, so that each file can be read alone.
"""

import os
from collections.abc import Callable
from math import nan
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from epp.data import INFLIGHT_REQUESTS, INFLIGHT_TOKENS, Datum
from epp.decision.decision import NO_USAGE, Decision, ProfileRun
from epp.plugin import Filter, Picker, Scorer
from epp.prefix.match import PrefixMatch
from epp.prefix.prediction import compared_match
from epp.recording.batches import CONTENT_MAX, packets
from epp.recording.keys import Keyed, id_hash
from epp.recording.records import ARRAY, ARRAY_HEAD, BATCH, CONFIGURED, DECIDED, ENDED, ENDPOINT_LIST
from epp.recording.sample import Sample
from epp.request import BYTES_PER_TOKEN, DEFAULT_FLOW, Request
from epp.request.intake import REQUEST_ID, request_objective

if TYPE_CHECKING:
    from epp.candidates import Candidates, EndpointList
    from epp.decision.pipeline import Pipeline, WiredProfile
    from workers.worker.telemetry.request_metrics import Exchange

BATCH_RECORDS_MAX: Final = 1024
WAITING_MAX: Final = 64  # records that wait to be encoded; each keeps its request and its decision alive
SHORT_ARRAY: Final = 16  # a msgpack array of fewer items has a head of one byte; the next kind has three
INT64: Final = np.dtype(np.int64)
BATCH_BYTES: Final = 4 * CONTENT_MAX  # larger batches need fewer calls; the last packet of a batch is not full
MODEL_CHARS_MAX: Final = 256
STREAM_BITS: Final = 4  # bytes of a stream's random number
UNENCODABLE: Final = (OverflowError, TypeError, ValueError, RecursionError)  # raised for a value that msgpack cannot hold
LATER: Final = -1  # the number of a request that is recorded or not depending on its end


class RecordSender:
    """Collects the records of one worker, and sends them in batches. `file`: the number of the file to write for, or 0 without a
    recording.
    """

    def __init__(self, worker: int, offer: Callable[[bytes], bool], lost: Callable[[int], object]) -> None:
        """`offer` puts a packet into the bus, or returns False if the bus is full. `lost` counts lost records."""
        self._offer = offer
        self._lost = lost
        self._encoder = msgspec.msgpack.Encoder()
        self.stream = int.from_bytes(os.urandom(STREAM_BITS), "little")
        self._head = self._encoder.encode((BATCH, self.stream, worker))
        self._buffer = bytearray()
        self._records = 0
        self.file = 0
        self.epoch = 0  # moves when configuration and endpoints must be described again
        self.endpoint_lists = 0
        self.requests = 0
        self._waiting: list[Pending | tuple[object, ...]] = []
        self._made: list[tuple[object, ...]] = []
        self._begin()

    def use(self, file: int) -> None:
        """Writes for this file from now on."""
        if file != self.file:
            self.flush()
            self.file = file
            self.epoch += 1

    def wait(self, record: "Pending | tuple[object, ...]") -> None:
        """Makes a record wait until it is encoded together with others. This runs twice per request, so it must be fast."""
        waiting = self._waiting
        waiting.append(record)
        if len(waiting) >= WAITING_MAX:
            self._encode()

    def add(self, record: tuple[object, ...]) -> None:
        """Adds a record to those that are encoded together."""
        self._made.append(record)

    def _encode(self) -> None:
        """Encodes the waiting records as one array, and puts the array into the buffer without its head."""
        waiting, self._waiting = self._waiting, []
        for record in waiting:
            if isinstance(record, Pending):
                record.by.make(record)
            else:
                self._made.append(record)
        made, self._made = self._made, []
        if not made:
            return
        try:
            encoded = self._encoder.encode(made)
        except UNENCODABLE:
            made = self._encodable(made)
            encoded = self._encoder.encode(made)
        self._buffer += memoryview(encoded)[1 if len(made) < SHORT_ARRAY else 3 :]
        self._records += len(made)
        if len(self._buffer) > BATCH_BYTES or self._records >= BATCH_RECORDS_MAX:
            self._send()

    def _encodable(self, made: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
        """Returns the records that can be encoded, and counts the others as lost. A foreign parser may set any value in a request, and its
        fault must cost neither another request's record nor the heartbeat, which sends the records.
        """
        kept = []
        for record in made:
            try:
                self._encoder.encode(record)
            except UNENCODABLE:
                self._lost(1)
            else:
                kept.append(record)
        return kept

    def flush(self) -> None:
        """Sends all records."""
        self._encode()
        self._send()

    def _send(self) -> None:
        records, buffer = self._records, self._buffer
        if not records:
            return
        buffer[1:ARRAY_HEAD] = (records + 1).to_bytes(ARRAY_HEAD - 1, "big")
        for packet in packets(buffer, records, self.stream, self.file):
            if not self._offer(packet):
                self._lost(records)
                self.epoch += 1  # the batch may have described what later records refer to
                break
        self._begin()

    def _begin(self) -> None:
        self._buffer[:] = ARRAY + bytes(ARRAY_HEAD - 1) + self._head
        self._records = 0


class Pending:
    """Holds a decision that is not encoded yet. `by`: its recorder. The other fields are those of `Recorder.decided`."""

    __slots__ = ("by", "decision", "now", "number", "received_at", "refused", "request")

    def __init__(
        self, by: "Recorder", number: int, request: Request, decision: Decision | None, refused: str, received_at: float, now: float
    ) -> None:
        self.by = by
        self.number = number
        self.request = request
        self.decision = decision
        self.refused = refused
        self.received_at = received_at
        self.now = now


class Recorder:
    """Records the requests of one configuration of a pool."""

    def __init__(
        self, sender: RecordSender, keyed: Keyed, *, generation: int, config_hash: str, pipeline: "Pipeline", pool: str = ""
    ) -> None:
        """`generation`, `config_hash`: the number and the hash of the configuration with this pipeline. `pool`: the name of one of several
        pools.
        """
        self._sender = sender
        self._keyed = keyed
        self._generation = generation
        wiring = pipeline.wiring
        self._match: Datum[PrefixMatch] | None = compared_match(wiring.producers, wiring.of(Scorer))
        self._reads_tokens = INFLIGHT_TOKENS in pipeline.columns
        self._headers = tuple(sorted({name for plugin in wiring.plugins for name in plugin.reads_headers}))
        profiles = [_scoring(wired) for wired in wiring.profiles]
        self._pool = (pool,) if pool else ()  # the last field of some records; missing if the picker has one pool
        self._configured = (CONFIGURED, generation, config_hash, profiles, self._headers, *self._pool)
        self._endpoint_list: EndpointList | None = None  # the endpoint list that was described last, as number `_listed`
        self._listed = 0
        self._described_in = 0  # the sender's epoch in which the configuration was described
        self.sample: Sample | None = None  # None if all requests are recorded

    def decided(self, request: Request, decision: Decision, received_at: float, now: float) -> int:
        """Records a request that got an endpoint. Returns its number, from 1, or LATER if the sample does not have the request so far."""
        if self.sample is not None and not self.sample.decided(now):
            return LATER
        return self._take(request, decision, "", received_at, now)

    def refused(self, request: Request, cause: str, received_at: float, now: float) -> None:
        """Records a request that was refused."""
        if self.sample is None or self.sample.refused(now):
            self._take(request, None, cause, received_at, now)

    def _take(self, request: Request, decision: Decision | None, refused: str, received_at: float, now: float) -> int:
        sender = self._sender
        number = sender.requests = sender.requests + 1
        sender.wait(Pending(self, number, request, decision, refused, received_at, now))
        return number

    def make(self, waited: Pending) -> None:
        """Makes the record of a decision that has waited."""
        sender, request, decision = self._sender, waited.request, waited.decision
        considered = request.considered
        if self._described_in != sender.epoch:
            self._described_in, self._endpoint_list = sender.epoch, None
            sender.add(self._configured)
        rows = inflight = tokens = None
        if considered is not None:
            if considered.snapshot.endpoint_list is not self._endpoint_list:
                self._describe(considered)
            rows = None if considered.rows is None else considered.rows.tobytes()
            counts = considered[INFLIGHT_REQUESTS]  # int64 in areas
            inflight = (counts if counts.dtype is INT64 else counts.astype(np.int64)).tobytes()
            if self._reads_tokens:
                tokens = considered[INFLIGHT_TOKENS].tobytes()
        match: PrefixMatch | None = None if self._match is None else request[self._match]
        block_tokens, hashes, matched = 0, b"", None
        prompt_tokens = request.body_bytes // BYTES_PER_TOKEN
        if match is not None:
            block_tokens, hashes, prompt_tokens = match.block_tokens, match.hashes.tobytes(), match.tokens
            if match.blocks is not None:
                matched = match.blocks.tobytes()
        headers = request.headers
        objective = request_objective(request)
        flow, model, target = request.fairness_id, request.model, request.target_model
        sender.add(
            (
                DECIDED,
                waited.number,
                id_hash(request.id or (decision.headers.get(REQUEST_ID, "") if decision is not None else "")),
                waited.received_at,
                waited.now - waited.received_at,
                self._generation,
                model[:MODEL_CHARS_MAX],
                "" if target == model else target[:MODEL_CHARS_MAX],
                0 if flow == DEFAULT_FLOW else self._keyed(flow),
                self._keyed(objective) if objective else 0,
                request.priority,
                request.ttl_s,
                request.streaming,
                request.body_bytes,
                request.max_tokens,
                prompt_tokens,
                block_tokens,
                hashes,
                self._listed,
                rows,
                inflight or b"",
                tokens,
                matched,
                [_run(name, run) for name, run in request.runs.items()],
                [target.slot for target in decision.targets] if decision is not None else [],
                waited.refused,
                [self._keyed(headers.get(name) or "") for name in self._headers],
                *self._pool,
            )
        )

    def ended(self, exchange: "Exchange", request: Request, decision: Decision, status: int, now: float) -> None:
        """Records how a request that got an endpoint has ended."""
        number = exchange.recorded
        notable = self.sample is not None and self.sample.ended(status, exchange.first_s, now)
        if number == LATER:
            if not notable:
                return
            number = self._take(request, decision, "", exchange.received_at, exchange.decided_at)
        usage = exchange.usage or NO_USAGE
        first_s = exchange.first_s
        self._sender.wait(
            (
                ENDED,
                number,
                status,
                decision.targets[0].slot,
                first_s if first_s == first_s else nan,
                now - exchange.received_at,
                exchange.streaming,
                exchange.whole,
                exchange.size,
                usage.prompt,
                usage.cached,
                usage.completion,
                exchange.pieces,
            )
        )

    def _describe(self, considered: "Candidates") -> None:
        sender = self._sender
        self._endpoint_list = endpoint_list = considered.snapshot.endpoint_list
        sender.endpoint_lists += 1
        self._listed = sender.endpoint_lists
        generations = np.array([endpoint.generation for endpoint in endpoint_list.endpoints], dtype=np.int64)
        sender.add((ENDPOINT_LIST, sender.endpoint_lists, endpoint_list.slots.tobytes(), generations.tobytes()))


def _scoring(wired: "WiredProfile") -> tuple[object, ...]:
    """Returns the fields of `epp.recording.records.Scoring`."""
    members = wired.members
    return (
        wired.name,
        wired.shadow,
        next(member.name for member, _ in members if isinstance(member, Picker)),
        [member.name for member, _ in members if isinstance(member, Filter)],
        [(member.name, weight, member.static) for member, weight in members if isinstance(member, Scorer)],
    )


def _run(name: str, run: ProfileRun | None) -> tuple[object, ...]:
    """Returns the fields of `epp.recording.records.Run`."""
    if run is None:
        return (name,)
    rows = run.candidates.rows
    return (
        name,
        None if rows is None else rows.tobytes(),
        run.totals.tobytes(),
        [None if scores is None else scores.tobytes() for scores in run.scores],
        run.picked,
    )
