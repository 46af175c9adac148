"""Queries of death: after a request has ended two workers, the picker refuses it, from any client, before it can end a third.

A worker publishes in its lane which request it is deciding (`DECIDING`: the fingerprint of its body, 0 between requests). If a worker
crashes, or hangs until the parent kills it, the parent reads the last fingerprint:

    the first time           remember the fingerprint, because the client's retry may reach any worker
    again within MEMORY_S    list the fingerprint for LISTED_S: every worker answers 400 to a request with it

The list is in memory that the parent writes and all children inherit. Both the list and the remembered fingerprints are bounded. A SIGKILL
that the parent did not send does not count, because the request need not be its cause. A fingerprint is the XXH3 hash of the whole body.
For a body longer than `WHOLE` bytes, it is the hash of its length, its first `WHOLE` / 2 and its last `WHOLE` / 2 bytes, so it takes 0.2 us
for any length.

This module does not notice a crash before the body is complete, or after the decision.
"""

import signal
from collections.abc import Callable
from typing import Final

from xxhash import xxh3_64_intdigest

from epp.errors import Cause, Refused
from workers.host.exit_codes import INTENDED

DECIDING: Final = "deciding"  # a gauge in a worker's lane
WHOLE: Final = 4096
PLACES: Final = 16
WORDS: Final = 1 + PLACES  # the number of listed fingerprints, then the fingerprints
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
    """Returns the 63-bit fingerprint of a body; 0 for an empty body."""
    size = len(body)
    if size > WHOLE:
        return xxh3_64_intdigest(body[-WHOLE // 2 :], xxh3_64_intdigest(body[: WHOLE // 2], size)) >> 1
    return xxh3_64_intdigest(body) >> 1 if size else 0


def crashed(code: int) -> bool:
    """Whether a child that ended with this code crashed by itself. `code`: the result of `os.waitstatus_to_exitcode`."""
    return code in CRASHES or (code > 0 and code not in INTENDED)


class Suspects:
    """The parent's side: remembers the requests that workers were deciding when they ended, and keeps the list of deadly ones."""

    def __init__(self, words: memoryview) -> None:
        """`words`: an array of `WORDS` int64 that only this object writes."""
        self._words = words
        self._seen: dict[int, float] = {}  # fingerprint -> when a worker last ended while deciding it, oldest first
        self._listed: dict[int, float] = {}  # fingerprint -> the end of its listing, soonest first

    def ended(self, suspect: int, now: float) -> bool:
        """Records that a worker ended while it was deciding this request. Returns whether the request is listed now."""
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
        self._publish()
        return True

    def look(self, now: float) -> None:
        """Removes expired fingerprints from the list."""
        expired = [suspect for suspect, until in self._listed.items() if until <= now]
        for suspect in expired:
            del self._listed[suspect]
        if expired:
            self._publish()

    def _publish(self) -> None:
        listed = list(self._listed)
        self._words[0] = 0  # so that workers see an empty list while it changes, not a mixture
        for place in range(PLACES):
            self._words[1 + place] = listed[place] if place < len(listed) else 0
        self._words[0] = len(listed)


class Deciding:
    """A worker's side. `word`: the fingerprint of the request that is decided now; 0 between requests.

    When code continues with a request that has waited, it must set `word` again, and clear it afterwards.
    """

    __slots__ = ("_listed", "_refused", "word")

    def __init__(self, word: memoryview, listed: memoryview, refused: Callable[[], None] = lambda: None) -> None:
        """`word`: one int64 in this worker's lane. `listed`: the parent's words. `refused` is called for each refused request."""
        self.word = word
        self._listed = listed
        self._refused = refused

    def begin(self, body: bytes | memoryview) -> int:
        """Publishes and returns the fingerprint of the request that is decided next. Raises Refused if the request is listed."""
        suspect = self.word[0] = fingerprint(body)
        count = self._listed[0]
        if count and suspect in self._listed[1 : 1 + count]:
            self._refused()
            raise Refused(Cause.DEADLY, f"{LISTED_S:.0f}")
        return suspect
