"""Defines what is known of the event streams of the endpoints: typed data between the reader of the streams, workers and plugins.

An endpoint is *precise* while the picker knows what it holds: its stream is open and has no gap. Otherwise a text says why not, and
plugins use the approximate match for it.
"""

from typing import Final

import msgspec

BEAT_S_MAX: Final = 1.0  # if its last beat is older than this, the reader of the streams does not run
WEIGHT_ONE: Final = 1000  # weights of tiers are thousandths
NO_READER: Final = "the kv-events process does not run"
NO_STREAM: Final = "its event stream is not followed yet"


class Tier(msgspec.Struct, array_like=True, frozen=True):
    """Describes the blocks that an endpoint holds in one tier. `owner`: their id in the index of held blocks. `weight`: thousandths."""

    owner: int
    name: str
    weight: int


class StreamRecord(msgspec.Struct, array_like=True, frozen=True):
    """Describes the stream of one endpoint. `endpoint`: its owner id in the approximate index; with slot and generation it identifies it.

    `precise`: whether its entries count; `why`: why they do not. `remark`: what else a user should know. `block_tokens`: 0 until an event
    says it. `links`: its owner id in the table of links. `tiers`: the tiers that it may use, in their order. `speculative`: the owner id of
    blocks that it will hold soon. `since`: when `precise` changed last, in monotonic seconds. `group`: the group whose blocks count; None:
    the engine has no groups.
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
