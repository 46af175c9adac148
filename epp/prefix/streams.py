"""Defines what is known of the event streams of the endpoints: typed data between the reader of the streams, workers and plugins.

An endpoint is *precise* while the picker knows what it holds: its stream is open and has no gap. Otherwise a text says why not, and
plugins use the approximate match for it.
"""

from typing import Final

import msgspec

HEARTBEAT_S_MAX: Final = 1.0  # if its last heartbeat is older than this, the reader of the streams does not run
WEIGHT_ONE: Final = 1000  # weights of tiers are thousandths
NO_READER: Final = "the kv-events process does not run"
NO_STREAM: Final = "its event stream is not followed yet"


class Tier(msgspec.Struct, array_like=True, frozen=True):
    """Describes one tier of an endpoint's KV cache, such as GPU memory.

    `owner`: the owner id under which the index of held blocks has the blocks of this tier. `weight`: what a block in this tier counts, in
    thousandths.
    """

    owner: int
    name: str
    weight: int


class StreamRecord(msgspec.Struct, array_like=True, frozen=True):
    """Describes the event stream of one endpoint.

    `slot`, `generation`, `endpoint` (its owner id in the approximate index): these three identify the endpoint. `address`: `host:port`.
    `precise`: whether the endpoint is precise; `why`: why it is not. `since`: when `precise` changed last, in monotonic seconds. `remark`:
    what else a user should know.
    `block_tokens`: tokens per block; 0 until an event says it. `tiers`: the tiers that the endpoint may use, in order. `speculative`: the
    owner id of blocks that it will hold soon. `links`: its owner id in the table of links. `group`: the group of KV caches whose blocks
    count; None: the engine has no groups.
    """

    slot: int
    generation: int
    endpoint: int
    precise: bool
    why: str
    remark: str
    block_tokens: int
    tiers: list[Tier]
    speculative: int
    address: str
    since: float
    group: int | None = None

    @property
    def identity(self) -> tuple[int, int, int]:
        return self.slot, self.generation, self.endpoint


class StreamsRecord(msgspec.Struct, array_like=True, frozen=True):
    """Holds the document of all streams. `adapters`: a word for the name of each adapter that events have named (`epp.prefix.held`)."""

    streams: list[StreamRecord]
    adapters: list[int]
