"""Traffic for the routing benchmark: what clients send, in virtual time, the same for whoever chooses the servers.

A session is a client's run of turns; the next turn starts `think_s` after the last answer's end. Everything follows from the seed.
Prompts are random bytes, 4 to a token, so that they share what they are made to share and nothing else.

What this does not do: look at answers (their text is part of the next prompt from the start), or give up waiting.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from loadtest.kv_pool import BYTES_PER_TOKEN, block_hashes, token_count

BLOCK_TOKENS = 16
HOT_SHARE = 0.6
BURST_EVERY_S = 0.25
BURST_S = 0.05  # all that comes in BURST_EVERY_S comes within this: five times the mean rate
BURST_SHARE = 0.7


class Turn:
    """One request: its prompt, the hashes of the engine's blocks, how many tokens it generates, and the pause before it."""

    __slots__ = ("hashes", "output", "prompt", "think_s", "tokens")

    def __init__(self, prompt: bytes, output: int, think_s: float = 0.0) -> None:
        self.prompt = prompt
        self.hashes = block_hashes(prompt, BLOCK_TOKENS, b"")
        self.tokens = token_count(prompt)
        self.output = output
        self.think_s = think_s


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one client, the first at `at`."""

    at: float
    turns: Sequence[Turn]


@dataclass(frozen=True, slots=True)
class Workload:
    """`make(rng, seconds)` gives the sessions. `shares`: prompts have prefixes in common."""

    name: str
    make: Callable[[random.Random, float], list[Session]]
    shares: bool = True


def arrivals(rng: random.Random, rate: float, seconds: float) -> Iterator[float]:
    """Poisson."""
    at = rng.expovariate(rate)
    while at < seconds:
        yield at
        at += rng.expovariate(rate)


def words(rng: random.Random, low: int, high: int) -> bytes:
    """Between so many tokens of text."""
    return rng.randbytes(rng.randint(low, high) * BYTES_PER_TOKEN)


def popular(count: int) -> list[float]:
    """Weights by Zipf's law."""
    return [1 / (rank + 1) for rank in range(count)]


def chats(rng: random.Random, seconds: float) -> list[Session]:
    """Conversations of 3 to 8 turns behind 12 system prompts, some more popular than others."""
    systems = [words(rng, 500, 3000) for _ in range(12)]
    sessions = []
    for at in arrivals(rng, 7.0, seconds):
        prompt = rng.choices(systems, popular(len(systems)))[0]
        turns = []
        for _ in range(rng.randint(3, 8)):
            prompt += words(rng, 50, 600)
            output = rng.randint(50, 250)
            turns.append(Turn(prompt, output, rng.expovariate(1 / 2.0)))
            prompt += rng.randbytes(output * BYTES_PER_TOKEN)
        sessions.append(Session(at, turns))
    return sessions


def documents(rng: random.Random, seconds: float) -> list[Session]:
    """Questions about 96 documents of 4,000 to 16,000 tokens, some more popular than others."""
    shelf = [words(rng, 4_000, 16_000) for _ in range(96)]
    return [
        single(at, rng.choices(shelf, popular(len(shelf)))[0] + words(rng, 50, 200), rng.randint(50, 200))
        for at in arrivals(rng, 9.0, seconds)
    ]


def prefixed(rng: random.Random, seconds: float, hot_share: float) -> list[Session]:
    """Prompts of 4,000 tokens that begin alike in 64 ways, and up to 400 tokens of their own; so much of it begins in one way."""
    prefixes = [words(rng, 4_000, 4_000) for _ in range(64)]
    sessions = []
    for at in arrivals(rng, 46.0, seconds):
        prefix = prefixes[0] if rng.random() < hot_share else rng.choice(prefixes)
        sessions.append(single(at, prefix + words(rng, 100, 400), rng.randint(100, 400)))
    return sessions


def hot(rng: random.Random, seconds: float) -> list[Session]:
    """60 % of the traffic has one prefix."""
    return prefixed(rng, seconds, HOT_SHARE)


def even(rng: random.Random, seconds: float) -> list[Session]:
    """The same without the hot spot."""
    return prefixed(rng, seconds, 0.0)


def unshared(rng: random.Random, seconds: float) -> list[Session]:
    """Nothing in common; most prompts are short, some long."""
    return [single(at, own(rng), rng.randint(20, 400)) for at in arrivals(rng, 36.0, seconds)]


def bursts(rng: random.Random, seconds: float) -> list[Session]:
    """All comes in bursts that are over before the next scrape; 70 % of a burst begins with the same one of 32 prefixes."""
    prefixes = [words(rng, 500, 3_000) for _ in range(32)]
    sessions = []
    start = 0.0
    while start < seconds:
        prefix = rng.choice(prefixes)
        for at in arrivals(rng, 5 * 36.0, BURST_S):
            prompt = prefix + words(rng, 100, 1_000) if rng.random() < BURST_SHARE else own(rng)
            sessions.append(single(start + at, prompt, rng.randint(20, 300)))
        start += BURST_EVERY_S
    return sessions


def own(rng: random.Random) -> bytes:
    """A prompt that shares nothing: 800 tokens at the median, 8,000 at most."""
    tokens = min(8_000, max(20, round(rng.lognormvariate(6.7, 1.0))))
    return rng.randbytes(tokens * BYTES_PER_TOKEN)


def single(at: float, prompt: bytes, output: int) -> Session:
    """One turn alone."""
    return Session(at, (Turn(prompt, output),))


WORKLOADS = (
    Workload("chats", chats),
    Workload("documents", documents),
    Workload("hot prefix", hot),
    Workload("no hot prefix", even),
    Workload("no sharing", unshared, shares=False),
    Workload("bursts", bursts),
)
