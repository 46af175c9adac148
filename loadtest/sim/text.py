"""Generates the texts and vectors of simulated answers.

They are deterministic: a linear congruential generator makes them from the seed and the prompt.
"""

from collections.abc import Iterator
from itertools import islice

from loadtest.sim.request import Ask

EMBEDDING_SIZE = 8
MASK = 2**64 - 1
WORDS = (
    b"time year people way day man thing woman life child world school state family student group "
    b"country problem hand part place case week company system program question work government "
    b"number night point home water room mother area money story fact month lot right study book "
    b"eye job word business issue side kind head house service friend father power hour game line "
    b"end member law"
).split(b" ")
assert len(WORDS) == 64, "the six top bits of the generator's state choose a word"


def words(origin: int) -> Iterator[bytes]:
    """Yields the words of an endless text. `origin`: the first state of the generator. Every word except the first begins with a space."""
    state = origin
    space = b""
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) & MASK
        yield space + WORDS[state >> 58]
        space = b" "


def text_of(ask: Ask, choice: int = 0) -> bytes:
    """Returns the whole completion of one choice."""
    return b"".join(islice(words(ask.origin + choice), ask.max_tokens))


def vector(origin: int) -> list[float]:
    """Returns a deterministic embedding. Each number is in [-1, 1)."""
    numbers = []
    for _ in range(EMBEDDING_SIZE):
        origin = (origin * 6364136223846793005 + 1442695040888963407) & MASK
        numbers.append((origin >> 40) / 2**23 - 1)
    return numbers
