"""Defines the state of the endpoints' event streams: typed data that the reader of the streams passes to workers and plugins.

An endpoint is *followed* while the picker knows which blocks it holds: its stream is open and has no gap. Otherwise, a text says why not,
and plugins use the approximate match. Matches with a followed endpoint are *precise* unless a remark says why they may be wrong.
"""

from typing import Final

import msgspec

HEARTBEAT_S_MAX: Final = 1.0  # the reader of the streams does not run if its last heartbeat is older than this
WEIGHT_ONE: Final = 1000  # weights of tiers are thousandths
NO_READER: Final = "the kv-events process does not run"
NO_STREAM: Final = "its event stream is not followed yet"
NOT_CONNECTED: Final = "no connection to its event socket"
LOST: Final = "the connection to its event socket is lost"
NO_EVENTS: Final = "no events received yet"
OTHER_TOPIC: Final = "its topic does not begin with topicFilter"
NAMELESS: Final = "its events give LoRA adapters by number, without their names"
REPLAYING: Final = "missed events are being replayed"
UNSURE: Final = "connected again; its next event will show whether some were missed"
COOLING: Final = "events were missed"
NO_ANSWER: Final = "its replay socket does not answer"
UNPROVEN: Final = "its connection was lost for a while, and its numbers go on"
PARTIAL: Final = "events before its stream was followed are unknown"
PARTLY_REUSED: Final = "its model has layers without full attention, so it may reuse fewer blocks than it holds"


class Tier(msgspec.Struct, array_like=True, frozen=True):
    """Describes one tier of an endpoint's KV cache, such as GPU memory.

    `owner`: the owner id under which the index of held blocks has the blocks of this tier. `weight`: the weight of a block in this tier, in
    thousandths.
    """

    owner: int
    name: str
    weight: int


def of_ranks(ranks: float) -> str:
    """Returns why a server with this many data-parallel ranks is matched approximately; "" for one rank and for NaN."""
    return f"{int(ranks)} data-parallel ranks share the address, each with a cache of its own" if ranks > 1.0 else ""


class StreamRecord(msgspec.Struct, array_like=True, frozen=True):
    """Describes the event stream of one endpoint.

    `slot`, `generation`, `endpoint` (the owner id in the approximate index): these three identify the endpoint. `address`: `host:port`.
    `followed`: whether the endpoint is followed; `why`: why it is not. `since`: when `followed` changed last, in monotonic seconds.
    `remark`: why matches with the endpoint may be wrong although it is followed; "" without such a reason.
    `block_tokens`: tokens per block; 0 until an event gives the number. `tiers`: the tiers that the endpoint may use, in order.
    `speculative`: the owner id of blocks that the endpoint will hold soon. `links`: the endpoint's owner id in the table of links. `group`:
    the group of KV caches from which blocks are used; None if the engine has no groups.
    """

    slot: int
    generation: int
    endpoint: int
    followed: bool
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
    """Holds the document of all streams. `adapters`: the `adapter_word` of each adapter that events have named (`epp.prefix.held`)."""

    streams: list[StreamRecord]
    adapters: list[int]
