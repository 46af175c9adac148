"""Defines the records of a recording and their msgpack form: arrays whose first element is the number of the kind.

    frame    an array of batches        what the supervisor compresses and writes at once
    batch    an array of records        from one worker, begun by `Batch`; or from the supervisor, without `Batch`

A worker does not create these objects: it encodes tuples of the same fields in the same order, because that costs half as much
(`workers.worker.telemetry.recorder`). Arrays of numbers are bytes in the byte order of x86 and Arm (little-endian), so a decoder copies
nothing.

A new field comes at the end of its record and has a default, so older files stay readable. Any other change raises VERSION.
"""

from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

VERSION: Final = 1
CONFIGURED: Final = 1
BATCH: Final = 4
ENDPOINT_LIST: Final = 5
DECIDED: Final = 6
ENDED: Final = 7
ARRAY: Final = b"\xdd"  # begins an array with a length of four bytes, the most significant one first
ARRAY_HEAD: Final = 5
INT64: Final = np.dtype("<i8")
FLOAT64: Final = np.dtype("<f8")


class Opened(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """Begins each file. `unix_s` and `monotonic_s` are one moment on two clocks; all other times are on the monotonic clock, in seconds.

    `number`: the number of the file in this recording. `secret`: a hash that is equal for pickers that hash prompts with one secret.
    `pools`: the names of several recorded pools; empty if there is one pool. The other records name their pool; "" if there is one pool.
    """

    version: int
    picker: str
    number: int
    unix_s: float
    monotonic_s: float
    secret: int
    pools: list[str] = []


class Scoring(msgspec.Struct, array_like=True, frozen=True):
    """One profile of a configuration. `scorers`: (name, weight, is static), in order. Static scorers read scraped values only."""

    name: str
    shadow: bool
    picker: str
    filters: list[str]
    scorers: list[tuple[str, float, bool]]


class Configured(msgspec.Struct, array_like=True, frozen=True, tag=CONFIGURED):
    """Describes a configuration. `generation`: the number of this configuration in its picker. `hash`: the hash of its text and plugin
    files, as `epp top` shows it.

    `headers`: the names of the headers that the configured plugins read (`Plugin.reads_headers`).
    """

    generation: int
    hash: str
    profiles: list[Scoring]
    headers: list[str]
    pool: str = ""


class Member(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """An endpoint that has joined (`joined`) or left at `at`. (`slot`, `generation`) identifies it in the whole recording."""

    at: float
    joined: bool
    slot: int
    generation: int
    namespace: str
    name: str
    address: str
    labels: dict[str, str]
    pool: str = ""


class Scraped(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """The endpoint table at the time `at`: the rows that have changed since the previous record.

    `columns`: the names of the columns; empty if they are those of the previous record. `slots`: int64. `scraped_at`: float64, monotonic
    seconds.
    `values`: float64 of shape (slots, columns), NaN if not reported.
    `states`: one byte per slot: 0 never scraped, 1 fresh, 2 stale; plus 4 if down, 8 if ejected.
    """

    at: float
    columns: list[str]
    slots: bytes
    scraped_at: bytes
    values: bytes
    states: bytes


class Batch(msgspec.Struct, array_like=True, frozen=True, tag=BATCH):
    """Begins the batch of a worker. `stream`: the number of a worker process; requests are numbered within a stream."""

    stream: int
    worker: int


class EndpointList(msgspec.Struct, array_like=True, frozen=True, tag=ENDPOINT_LIST):
    """The endpoints to which the rows of later `Decided` records of this stream refer.

    `slots`, `generations`: int64, shape (endpoints,).
    """

    number: int
    slots: bytes
    generations: bytes


class Run(msgspec.Struct, array_like=True, frozen=True):
    """The run of one profile; `rows`, `totals` and `scores` are empty if its filters left no candidate.

    `rows`: int64, the rows of the scored endpoints in the endpoint_list; None for all rows. `totals`: float64, one per scored endpoint.
    `scores`: float64, for each scorer that is not static; None if all are 0. `picked`: indices into the scored endpoints, best first.
    """

    profile: str
    rows: bytes | None = None
    totals: bytes = b""
    scores: list[bytes | None] = []
    picked: list[int] = []


class Decided(msgspec.Struct, array_like=True, frozen=True, tag=DECIDED):
    """A request that got an endpoint or was refused.

    `number`: counts the requests of a stream. `id`: hash of the x-request-id if that is a UUID, otherwise 0 (`epp.recording.keys`).
    `at`: when the headers came. `waited_s`: the time from then to the picker's answer. `generation`: the number of the configuration.
    `target_model`: empty if it equals `model`. `flow`: keyed hash of the fairness id, or 0. `objective`: keyed hash of the objective's
    name, or 0. `prompt_tokens`: as the picker counts or estimates them.
    `block_tokens`: tokens per block; 0 if no producer divides prompts. `hashes`: uint64, the chain of block hashes under the secret.
    `endpoint_list`: the number of the EndpointList. `rows`: int64, the endpoints that the request might have got; None for all.
    `inflight`: int64, requests in flight at each of `rows`. `inflight_tokens`: float64, tokens in flight; None if no plugin reads them.
    `matched`: float64 of shape (endpoints of the endpoint list,), leading blocks that each holds; None if no endpoint holds a block.
    `runs`: the profiles that ran. `targets`: the slots of the chosen endpoints, best first. `refused`: the cause if there are no targets.
    `facts`: one keyed hash per header of `Configured.headers`; 0 if the request has no such header.
    """

    number: int
    id: int
    at: float
    waited_s: float
    generation: int
    model: str
    target_model: str
    flow: int
    objective: int
    priority: int
    ttl_s: float | None
    streaming: bool
    body_bytes: int
    max_tokens: int | None
    prompt_tokens: int
    block_tokens: int
    hashes: bytes
    endpoint_list: int
    rows: bytes | None
    inflight: bytes
    inflight_tokens: bytes | None
    matched: bytes | None
    runs: list[Run]
    targets: list[int]
    refused: str
    facts: list[int] = []
    pool: str = ""


class Ended(msgspec.Struct, array_like=True, frozen=True, tag=ENDED):
    """How request `number` of a stream ended. Times are in seconds from `Decided.at`.

    `status`: the HTTP status of the answer; 0 without an answer. `slot`: the endpoint that served the request. `first_s`: the time to the
    first piece of the answer's body; NaN without a body. `lasted_s`: the time to the end of the answer. `streaming`: whether the answer was
    an event stream. `whole`: whether the answer came to its end. `answer_bytes`: the size of the body. `prompt`, `cached`, `completion`:
    tokens that the server reported; None if not reported. `pieces`: the number of messages in which the body came; 0 if not recorded.
    """

    number: int
    status: int
    slot: int
    first_s: float
    lasted_s: float
    streaming: bool
    whole: bool
    answer_bytes: int
    prompt: int | None
    cached: int | None
    completion: int | None
    pieces: int = 0

    @property
    def per_token_s(self) -> float | None:
        """Returns the seconds per output token after the first one; None if not known."""
        if not self.streaming or self.completion is None or self.completion < 2 or self.first_s != self.first_s:
            return None
        return (self.lasted_s - self.first_s) / (self.completion - 1)


class Lost(msgspec.Struct, array_like=True, frozen=True, tag=8):
    """Says that `records` records were lost between the previous `Lost` and `at`, because a pipe, a queue or the disk was full."""

    at: float
    records: int


class Named(msgspec.Struct, array_like=True, frozen=True, tag=9):
    """The adapters that an endpoint reports, by column, from `at` on."""

    at: float
    slot: int
    columns: dict[str, list[str]]


Record: TypeAlias = Opened | Configured | Member | Scraped | Batch | EndpointList | Decided | Ended | Lost | Named

_encoder: Final = msgspec.msgpack.Encoder()
_frame: Final = msgspec.msgpack.Decoder(list[list[Record]])


class CorruptFrame(Exception):
    """Says that bytes are not a frame of records. The text says why."""


def batch(records: list[Record]) -> bytes:
    """Encodes records of the supervisor as one batch."""
    return _encoder.encode(records)


def frame(batches: list[bytes]) -> bytes:
    """Returns the frame of these encoded batches."""
    return ARRAY + len(batches).to_bytes(ARRAY_HEAD - 1, "big") + b"".join(batches)


def decode(data: bytes) -> list[list[Record]]:
    """Returns the batches of a frame. Raises CorruptFrame."""
    try:
        return _frame.decode(data)
    except msgspec.MsgspecError as problem:
        raise CorruptFrame(str(problem)) from problem


def floats(data: bytes) -> NDArray[np.float64]:
    """Returns the numbers of a field of float64."""
    return np.frombuffer(data, FLOAT64)


def ints(data: bytes) -> NDArray[np.int64]:
    """Returns the numbers of a field of int64."""
    return np.frombuffer(data, INT64)
