"""Queries of death: a request that ended two workers is refused before it can end a third, whoever sends it again.

A worker says in its lane which request it is deciding (`DECIDING`: the fingerprint of its body, 0 between requests). When a
worker has crashed, or hung until the parent ended it, the parent reads what it said last:

    the first time      the fingerprint is remembered: the client's next try may reach any worker
    within MEMORY_S     the fingerprint is listed for LISTED_S: every worker answers 400 to what has it

The list is the parent's words, in memory that all children inherit; both it and what is remembered are bounded. A SIGKILL that the
parent did not send says nothing of the request at hand and is not counted. A fingerprint is XXH3 of a body up to `WHOLE` bytes, of a
longer one's first and last half of that, and its length: 0.2 us, however long it is.

What this does not do: see what a request does before its body is whole, or after its decision.
"""

import signal
from collections.abc import Callable
from typing import Final

from xxhash import xxh3_64_intdigest

from epp.errors import Cause, Refused
from workers.exit_codes import INTENDED

DECIDING: Final = "deciding"  # a worker's gauge
WHOLE: Final = 4096
PLACES: Final = 16
WORDS: Final = 1 + PLACES  # how many are listed, then who
REMEMBERED_MAX: Final = 256
MEMORY_S: Final = 600.0
LISTED_S: Final = 600.0
CRASHES: Final = frozenset(
    -number
    for number in (
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGABRT,
        signal.SIGSYS,
        signal.SIGTRAP,
    )
)


def fingerprint(body: bytes | memoryview) -> int:
    """63 bits of a body; 0: there is none."""
    size = len(body)
    if size > WHOLE:
        return xxh3_64_intdigest(body[-WHOLE // 2 :], xxh3_64_intdigest(body[: WHOLE // 2], size)) >> 1
    return xxh3_64_intdigest(body) >> 1 if size else 0


def crashed(code: int) -> bool:
    """Whether a child that ended so was ended by what it did. `code` as `os.waitstatus_to_exitcode` gives it."""
    return code in CRASHES or (code > 0 and code not in INTENDED)


class Suspects:
    """The parent's side: who was being decided when workers ended, and the list that follows from it."""

    def __init__(self, words: memoryview) -> None:
        """`words` are `WORDS` int64 that nobody else writes."""
        self._words = words
        self._seen: dict[int, float] = {}  # fingerprint -> when a worker ended by it last, oldest first
        self._listed: dict[int, float] = {}  # fingerprint -> until when, soonest first

    def ended(self, suspect: int, now: float) -> bool:
        """A worker has ended while it decided this; whether that makes it listed."""
        last = self._seen.pop(suspect, None)
        self._seen[suspect] = now
        if len(self._seen) > REMEMBERED_MAX:
            del self._seen[next(iter(self._seen))]
        if last is None or now - last > MEMORY_S:
            return False
        self._listed.pop(suspect, None)
        self._listed[suspect] = now + LISTED_S
        if len(self._listed) > PLACES:
            del self._listed[next(iter(self._listed))]
        self._tell()
        return True

    def look(self, now: float) -> None:
        """Takes from the list whose time is over."""
        over = [suspect for suspect, until in self._listed.items() if until <= now]
        for suspect in over:
            del self._listed[suspect]
        if over:
            self._tell()

    def _tell(self) -> None:
        listed = list(self._listed)
        self._words[0] = 0  # none, rather than a list of old and new
        for place in range(PLACES):
            self._words[1 + place] = listed[place] if place < len(listed) else 0
        self._words[0] = len(listed)


class Deciding:
    """A worker's side. `word` says which request is being decided: whoever goes on with one sets it, and clears it after."""

    __slots__ = ("_listed", "_refused", "word")

    def __init__(self, word: memoryview, listed: memoryview, refused: Callable[[], None] = lambda: None) -> None:
        """`word` is one int64 of this worker, `listed` the parent's words; `refused` is called when a request is."""
        self.word = word
        self._listed = listed
        self._refused = refused

    def begin(self, body: bytes | memoryview) -> int:
        """The fingerprint of the request that is decided from here on. Raises Refused if it is listed."""
        suspect = self.word[0] = fingerprint(body)
        count = self._listed[0]
        if count and suspect in self._listed[1 : 1 + count]:
            self._refused()
            raise Refused(Cause.DEADLY, f"{LISTED_S:.0f}")
        return suspect
