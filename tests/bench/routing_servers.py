"""The server models of the routing benchmark: servers of one kind, usually eight. No policy but the oracles is told which kind it is.

Shares of time are of the run, from 0 to 1. `PACES` are further kinds, each with a pace of its own: from 0.02 to 1 ms a token, with 4, 8 or
32 slots or with shared prefill. Everything in them takes longer by the same factor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from loadtest.sim.chunked import ChunkedServer, ChunkedSettings
from loadtest.sim.engine import Engine, EngineSettings, Job
from loadtest.sim.kv_pool import Change
from loadtest.sim.server_model import ServerModel
from loadtest.sim.slots import SlotServer
from loadtest.sim.slowed import SlowedServer
from tests.bench.routing_traffic import BLOCK_TOKENS, CACHES, CROWDED, FAILURES, SERVERS

PREFILL_S = 100e-6  # per token
SHARED_DECODE_S, SLOT_DECODE_S = 0.025, 0.010
SLOWER = 3.0
SLOW_FROM_THE_START, SLOW_LATER = (2, 5), 6

SLOTS = 8
PLACES = 256  # requests that a server without slots runs at once

Changed = Callable[[int, Job, Sequence[Change]], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of servers. `make(servers, kv_blocks, changed)`: returns so many; `changed` gets the changes of their pools, if told.

    `rate`: how much of the requests per second of a workload these servers get. `slowed`: server -> (share of time, factor from then on),
    of the first SERVERS; further ones are like these. `pace`: how many times longer everything takes, also the time between requests.
    `slots`: of a server; 0: it has none. `capacity`: how much of the prompts that servers could compute at the usual speed these can
    compute while they also decode, at their slowest.
    """

    name: str
    make: Callable[[int, int, Changed], list[SlowedServer]]
    rate: Mapping[str, float] = field(default_factory=dict)
    usual_rate: float = 1.0
    slowed: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    pace: float = 1.0
    slots: int = 0
    capacity: float = 1.0

    def slowed_of(self, servers: int) -> Mapping[int, tuple[float, float]]:
        """Returns `slowed` for so many servers."""
        return {server: self.slowed[server % SERVERS] for server in range(servers) if server % SERVERS in self.slowed}


def shared(servers: int, kv_blocks: int, changed: Changed) -> list[SlowedServer]:
    settings = EngineSettings(kv_blocks=kv_blocks, block_size=BLOCK_TOKENS, prefill_s_per_token=PREFILL_S, decode_s=SHARED_DECODE_S)
    return _all(servers, lambda server: Engine(settings, lambda job, changes: changed(server, job, changes)))


def slots(servers: int, kv_blocks: int, changed: Changed) -> list[SlowedServer]:
    return _all(servers, lambda _: SlotServer(slot_settings(kv_blocks)))


def slot_settings(kv_blocks: int, slots: int = SLOTS) -> EngineSettings:
    return EngineSettings(slots, kv_blocks, BLOCK_TOKENS, prefill_s_per_token=PREFILL_S, decode_s=SLOT_DECODE_S)


def chunked(servers: int, kv_blocks: int, changed: Changed) -> list[SlowedServer]:
    settings = ChunkedSettings(kv_blocks=kv_blocks, block_size=BLOCK_TOKENS, prefill_s_per_token=PREFILL_S)
    return _all(servers, lambda _: ChunkedServer(settings))


def _all(servers: int, make: Callable[[int], ServerModel]) -> list[SlowedServer]:
    return [SlowedServer(make(server)) for server in range(servers)]


SLOT_RATES = {  # about three quarters of the slots are taken
    "chats": 1.4,
    "documents": 3.0,
    "nothing shared": 0.6,
    "hot prefix": 0.42,
    "bursts": 0.75,
    "tenants": 1.2,
    "a server dies": 1.1,
    "a server joins": 2.3,
    "library, evicting": 3.0,
    "no hot prefix": 0.42,
    "a server sheds": 0.6,
    **{f"a server answers {what}": 0.6 for what, _ in FAILURES},
    **{f"caches {times:g}, {tokens // 1000}k": 1.0 if tokens == 1_000 else 3.0 for tokens, *_ in CROWDED for times in CACHES},
}
KINDS = (
    Kind("shared", shared),
    Kind("slots", slots, rate=SLOT_RATES, slots=SLOTS),
    Kind("chunked", chunked, capacity=0.9),
    Kind(
        "mixed",
        shared,
        usual_rate=0.7,
        slowed={**dict.fromkeys(SLOW_FROM_THE_START, (0.0, SLOWER)), SLOW_LATER: (0.5, SLOWER)},
        capacity=(5 + 3 / SLOWER) / SERVERS,
    ),
)
PACES_MS = (0.02, 0.1, 0.3, 1.0)  # per token
SLOTS_OF_PACES = (4, 8, 32)


def slower(kind: Kind, pace: float) -> Kind:
    """Returns servers of this kind for which everything takes `pace` times as long, also the time between requests."""

    def make(servers: int, kv_blocks: int, changed: Changed) -> list[SlowedServer]:
        return [SlowedServer(SlowedServer(server, pace)) for server in kind.make(servers, kv_blocks, changed)]

    return replace(kind, make=make, pace=pace * kind.pace)


def _paced(ms: float, slots: int) -> Kind:
    """Returns the kind of servers with this pace. `slots`: 0: prefill is shared."""

    def make(servers: int, kv_blocks: int, changed: Changed) -> list[SlowedServer]:
        if not slots:
            return shared(servers, kv_blocks, changed)
        return _all(servers, lambda _: SlotServer(slot_settings(kv_blocks, slots)))

    rates = {name: rate * slots / 8 for name, rate in SLOT_RATES.items()} if slots else {}
    return slower(Kind(f"{ms:g} ms, {slots or 'no'} slots", make, rate=rates, slots=slots), ms / 1000.0 / PREFILL_S)


PACES = tuple(_paced(ms, slots) for ms in PACES_MS for slots in (0, *SLOTS_OF_PACES))
