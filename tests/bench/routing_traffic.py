"""Makes the traffic for the routing benchmark: the requests of clients in virtual time, the same under every policy.

A session is a series of turns of one client. A turn starts `think_s` after the end of the last answer. Everything follows from the
seed. Prompts are random bytes, 4 per token, so that they share exactly the intended prefixes.

Clients do not look at answers (the next prompt contains their text from the start), and do not give up waiting.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from loadtest.sim.kv_pool import BYTES_PER_TOKEN, block_hashes, token_count

SERVERS = 8
BLOCK_TOKENS = 16
HOT_SHARE = 0.6
KV_BLOCKS = 24_000  # of a server
FEW_KV_BLOCKS = 6_000
LIBRARY_TOKENS = 3 * SERVERS * FEW_KV_BLOCKS * BLOCK_TOKENS // 2  # 1.5 times the caches of eight servers
BURST_EVERY_S = 0.25
BURST_S = 0.05  # all requests of BURST_EVERY_S arrive within this time: five times the mean rate
BURST_SHARE = 0.7
PAUSED_BURST = 40
PAUSED_BURST_EVERY_S = 4.0


class Turn:
    """One request: its prompt, the hashes of the engine's blocks, the number of tokens to generate, and the pause before it."""

    __slots__ = ("hashes", "output", "prompt", "think_s", "tokens")

    def __init__(self, prompt: bytes, output: int, think_s: float = 0.0) -> None:
        self.prompt = prompt
        self.hashes = block_hashes(prompt, BLOCK_TOKENS, b"")
        self.tokens = token_count(prompt)
        self.output = output
        self.think_s = think_s


@dataclass(frozen=True, slots=True)
class Session:
    """The turns of one client. The first one starts at `at`."""

    at: float
    turns: Sequence[Turn]


def paced(sessions: list[Session], pace: float) -> list[Session]:
    """Returns the sessions with `pace` times the time between requests."""
    for session in sessions:
        for turn in session.turns:
            turn.think_s *= pace
    return [Session(pace * session.at, session.turns) for session in sessions]


@dataclass(frozen=True, slots=True)
class Failing:
    """A server that answers every request at once, after a share of the time, with this status. The status 200 has an empty body."""

    server: int
    share: float
    status: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of traffic. `make(rng, seconds, rate)`: returns the sessions, at `rate` times the usual number per second.

    `kv_blocks`: the size of each server's cache. `dies`, `joins`: a server that does so, and after which share of the time. `fails`: a
    server that answers at once with an error from then on. `pauses`: a server that stands still from then on, for a share of the time.
    `sheds`: a server that answers 429 while it has so many requests. `servers`: how many there are. `usual`: whether it runs without
    being asked for.
    """

    name: str
    make: Callable[[random.Random, float, float], list[Session]]
    kv_blocks: int = KV_BLOCKS
    dies: tuple[int, float] | None = None
    joins: tuple[int, float] | None = None
    fails: Failing | None = None
    pauses: tuple[int, float, float] | None = None
    sheds: tuple[int, int] | None = None
    servers: int = SERVERS
    usual: bool = True


def arrivals(rng: random.Random, rate: float, seconds: float) -> Iterator[float]:
    """Yields the times of Poisson arrivals. `rate`: per second."""
    at = rng.expovariate(rate)
    while at < seconds:
        yield at
        at += rng.expovariate(rate)


def words(rng: random.Random, low: int, high: int) -> bytes:
    """Returns a random text of `low` to `high` tokens."""
    return rng.randbytes(rng.randint(low, high) * BYTES_PER_TOKEN)


def popular(count: int) -> list[float]:
    """Returns weights by Zipf's law."""
    return [1 / (rank + 1) for rank in range(count)]


def chats(rng: random.Random, seconds: float, rate: float = 1.0) -> list[Session]:
    """Makes conversations of 3 to 8 turns. Each begins with one of 12 system prompts, of which some are more popular."""
    systems = [words(rng, 500, 3000) for _ in range(12)]
    sessions = []
    for at in arrivals(rng, 7.0 * rate, seconds):
        prompt = rng.choices(systems, popular(len(systems)))[0]
        turns = []
        for _ in range(rng.randint(3, 8)):
            prompt += words(rng, 50, 600)
            output = rng.randint(50, 250)
            turns.append(Turn(prompt, output, rng.expovariate(1 / 2.0)))
            prompt += rng.randbytes(output * BYTES_PER_TOKEN)
        sessions.append(Session(at, turns))
    return sessions


def documents(rng: random.Random, seconds: float, rate: float = 1.0) -> list[Session]:
    """Makes questions about 96 documents of 4,000 to 16,000 tokens. Some documents are more popular."""
    shelf = [words(rng, 4_000, 16_000) for _ in range(96)]
    return [
        single(at, rng.choices(shelf, popular(len(shelf)))[0] + words(rng, 50, 200), rng.randint(50, 200))
        for at in arrivals(rng, 9.0 * rate, seconds)
    ]


def library(rng: random.Random, seconds: float, rate: float = 1.0) -> list[Session]:
    """Makes questions about documents that are together 1.5 times as large as the caches of all servers, so that caches evict."""
    shelf: list[bytes] = []
    while sum(map(len, shelf)) < LIBRARY_TOKENS * BYTES_PER_TOKEN:
        shelf.append(words(rng, 4_000, 16_000))
    return [
        single(at, rng.choices(shelf, popular(len(shelf)))[0] + words(rng, 50, 200), rng.randint(50, 200))
        for at in arrivals(rng, 9.0 * rate, seconds)
    ]


def crowded(tokens: int, count: int, per_second: float, rng: random.Random, seconds: float, rate: float = 1.0) -> list[Session]:
    """Makes questions about `count` texts of so many tokens. Some texts are more popular."""
    shelf = [words(rng, tokens, tokens) for _ in range(count)]
    return [
        single(at, rng.choices(shelf, popular(count))[0] + words(rng, 50, 200), rng.randint(50, 200))
        for at in arrivals(rng, per_second * rate, seconds)
    ]


def prefixed(rng: random.Random, seconds: float, rate: float, hot_share: float) -> list[Session]:
    """Makes prompts with one of 64 prefixes of 4,000 tokens, and up to 400 more tokens. A share of `hot_share` has the same prefix."""
    prefixes = [words(rng, 4_000, 4_000) for _ in range(64)]
    sessions = []
    for at in arrivals(rng, 46.0 * rate, seconds):
        prefix = prefixes[0] if rng.random() < hot_share else rng.choice(prefixes)
        sessions.append(single(at, prefix + words(rng, 100, 400), rng.randint(100, 400)))
    return sessions


def hot(rng: random.Random, seconds: float, rate: float = 1.0) -> list[Session]:
    """Makes prompts of which 60 % have the same prefix."""
    return prefixed(rng, seconds, rate, HOT_SHARE)


def even(rng: random.Random, seconds: float, rate: float = 1.0) -> list[Session]:
    """Makes the traffic of `hot` without its most frequent prefix."""
    return prefixed(rng, seconds, rate, 0.0)


def unshared(rng: random.Random, seconds: float, rate: float = 1.0) -> list[Session]:
    """Makes prompts without a common prefix. Most are short, some are long."""
    return [single(at, unique(rng), rng.randint(20, 400)) for at in arrivals(rng, 36.0 * rate, seconds)]


def bursts(rng: random.Random, seconds: float, rate: float = 1.0) -> list[Session]:
    """Makes bursts that end before the next scrape. 70 % of the prompts in a burst share one of 32 prefixes."""
    prefixes = [words(rng, 500, 3_000) for _ in range(32)]
    sessions = []
    start = 0.0
    while start < seconds:
        prefix = rng.choice(prefixes)
        for at in arrivals(rng, 5 * 36.0 * rate, BURST_S):
            prompt = prefix + words(rng, 100, 1_000) if rng.random() < BURST_SHARE else unique(rng)
            sessions.append(single(start + at, prompt, rng.randint(20, 300)))
        start += BURST_EVERY_S
    return sessions


def tenants(rng: random.Random, seconds: float, rate: float = 1.0) -> list[Session]:
    """Makes the traffic of four tenants at once: chats, questions about documents, prompts that share nothing, and batches.

    A batch is 24 prompts with one prefix of 2,000 tokens within 0.2 s, every five seconds.
    """
    sessions = [*chats(rng, seconds, 0.35 * rate), *documents(rng, seconds, 0.3 * rate), *unshared(rng, seconds, 0.3 * rate)]
    prefix = words(rng, 2_000, 2_000)
    start = rng.random()
    while start < seconds:
        for _ in range(round(24 * rate)):
            sessions.append(single(start + 0.2 * rng.random(), prefix + words(rng, 50, 400), rng.randint(50, 200)))
        start += 5.0
    return sessions


def paused(rng: random.Random, seconds: float, rate: float = 1.0) -> list[Session]:
    """Makes a few short prompts per second, and from a third of the time on bursts of 40, all of which arrive before the next scrape."""
    sessions = [single(at, words(rng, 20, 60), 50) for at in arrivals(rng, 8.0 * rate, seconds)]
    start = seconds / 3
    while start < seconds:
        sessions += [single(start + 0.02 * rng.random(), words(rng, 100, 300), 50) for _ in range(PAUSED_BURST)]
        start += PAUSED_BURST_EVERY_S
    return sessions


def unique(rng: random.Random) -> bytes:
    """Makes a prompt without a common prefix. The median length is 800 tokens, the limit 8,000."""
    tokens = min(8_000, max(20, round(rng.lognormvariate(6.7, 1.0))))
    return rng.randbytes(tokens * BYTES_PER_TOKEN)


def single(at: float, prompt: bytes, output: int) -> Session:
    """Makes a session of one turn."""
    return Session(at, (Turn(prompt, output),))


# Texts of so many tokens, how many there are, and requests per second.
CROWDED = ((1_000, 480, 36.0), (10_000, 96, 9.0))
CACHES = (1.2, 2.0, 5.0)  # how many times the texts the caches of all servers hold together
FAILURES = (("404", 404), ("429", 429), ("400", 400), ("nothing", 200))
WORKLOADS = (
    Workload("chats", chats),
    Workload("documents", documents),
    Workload("nothing shared", unshared),
    Workload("hot prefix", hot),
    Workload("bursts", bursts),
    Workload("tenants", tenants),
    Workload("a server dies", chats, dies=(3, 0.5)),
    Workload("a server joins", documents, joins=(3, 0.4)),
    Workload("library, evicting", library, kv_blocks=FEW_KV_BLOCKS, usual=False),
    Workload("no hot prefix", even, usual=False),
    *(
        Workload(
            f"caches {times:g}, {tokens // 1000}k",
            partial(crowded, tokens, count, per_second),
            kv_blocks=round(times * count * tokens / (SERVERS * BLOCK_TOKENS)),
            usual=False,
        )
        for tokens, count, per_second in CROWDED
        for times in CACHES
    ),
    *(Workload(f"a server answers {what}", unshared, fails=Failing(3, 0.25, status), usual=False) for what, status in FAILURES),
    Workload("a server sheds", unshared, sheds=(3, 4), usual=False),
    Workload("a pause while it learns", paused, pauses=(0, 0.1, 0.1), servers=2, usual=False),
)
