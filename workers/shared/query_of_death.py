"""Queries of death: after a request has ended two workers, the picker refuses it, from any client, before it can end a third.

A worker publishes in its area which request it is deciding (`DECIDING`: the request's fingerprint, 0 between requests). If a worker
crashes, or hangs until the parent kills it, the parent reads the last fingerprint:

    the first time           watch the fingerprint for MEMORY_S, because the client's retry may reach any worker
    again while watched      list the fingerprint for LISTED_S: every worker answers 400 to a request with it

A request that damages memory may crash a worker later, while the worker decides another request, most likely a frequent one. So workers
count in their areas how often they began to decide a watched request. A request that was decided HARMLESS times since its crash is not
listed.

The table of fingerprints is bounded, in memory that the parent writes and all children inherit. The parent ignores a SIGKILL that it did
not send, because the request need not be the cause. A fingerprint is the XXH3 hash of the whole body, the path, and the headers that the
picker reads. The seed is secret, so that no client can make a request with the fingerprint of another client's request.

This module does not notice a crash before the body is complete, or after the decision.
"""

import signal
from collections.abc import Callable, Sequence
from typing import Final

from xxhash import xxh3_64, xxh3_64_intdigest

from epp.errors import Cause, Refused
from epp.request import Request
from epp.request.client_headers import GROUPS
from workers.host.exit_codes import INTENDED

DECIDING: Final = "deciding"  # a gauge in a worker's area
PLACES: Final = 32
# gauges in a worker's area, one per place of the table
TRIED: Final = tuple(f"tried_{place}" for place in range(PLACES))
# the number of used places, then the fingerprint in each place: negative if the fingerprint is listed, 0 if the place is free
WORDS: Final = 1 + PLACES
MEMORY_S: Final = 600.0
LISTED_S: Final = 600.0
HARMLESS: Final = 16
SEED_MASK: Final = (1 << 64) - 1
# Headers that the picker itself reads, besides those that its plugins declare.
OWN_HEADERS: Final = ("content-encoding", *(name for names in GROUPS.values() for name in names))
CRASHES: Final = frozenset(
    -number for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP)
)


def crashed(code: int) -> bool:
    """Returns whether a child that ended with this code crashed by itself. `code`: the result of `os.waitstatus_to_exitcode`."""
    return code in CRASHES or (code > 0 and code not in INTENDED)


class Suspect:
    """Remembers a request that a worker was deciding when the worker ended. Times are monotonic seconds.

    `place`: the place of its fingerprint in the table. `at`: when a worker last ended. `until`: the end of its listing, or 0 if the request
    is only watched. `before`: the count of this place in each area at the time `at`.
    """

    __slots__ = ("at", "before", "place", "until")

    def __init__(self, place: int, at: float, until: float, before: Sequence[int]) -> None:
        self.place = place
        self.at = at
        self.until = until
        self.before = before


class Suspects:
    """The parent's side: remembers the requests that workers were deciding when they ended, and keeps the table of fingerprints."""

    def __init__(self, table: memoryview, scalars: Callable[[str], Sequence[int]]) -> None:
        """`table`: an empty array of `WORDS` int64 that only this object writes. `scalars` returns the values of a gauge in all areas."""
        self._table = table
        self._scalars = scalars
        self._known: dict[int, Suspect] = {}  # by fingerprint, the oldest end of a worker first

    def ended(self, fingerprint: int, now: float) -> bool:
        """Records that a worker ended while it was deciding this request. Returns whether the request is listed from now on."""
        suspect = self._known.pop(fingerprint, None)
        again = suspect is not None and now - suspect.at <= MEMORY_S and self._decided(suspect) < HARMLESS
        if suspect is None:
            suspect = Suspect(self._room(), now, 0.0, ())
        suspect.at, suspect.before = now, self._scalars(TRIED[suspect.place])
        if again:
            suspect.until = now + LISTED_S
        self._known[fingerprint] = suspect
        self._publish()
        return again

    def look(self, now: float) -> None:
        """Ends listings, and forgets requests that ended no worker for MEMORY_S."""
        changed = False
        for fingerprint, suspect in list(self._known.items()):
            if suspect.until and suspect.until <= now:
                suspect.until, changed = 0.0, True
            if not suspect.until and now - suspect.at > MEMORY_S:
                del self._known[fingerprint]
                changed = True
        if changed:
            self._publish()

    def _decided(self, suspect: Suspect) -> int:
        """Returns how often workers have begun to decide the request since it last ended a worker. A new worker counts from 0."""
        counts = zip(self._scalars(TRIED[suspect.place]), suspect.before, strict=False)
        return sum(now - before if now >= before else now for now, before in counts)

    def _room(self) -> int:
        """Returns a free place. If no place is free, forgets the request that has been watched longest, or else listed longest."""
        if len(self._known) < PLACES:
            taken = {suspect.place for suspect in self._known.values()}
            return next(place for place in range(PLACES) if place not in taken)
        watched = (fingerprint for fingerprint, suspect in self._known.items() if not suspect.until)
        return self._known.pop(next(watched, next(iter(self._known)))).place

    def _publish(self) -> None:
        table = self._table
        table[0] = 0  # so that workers see an empty table while it changes, not a mixture
        words = [0] * PLACES
        for fingerprint, suspect in self._known.items():
            words[suspect.place] = -fingerprint if suspect.until else fingerprint
        for place, word in enumerate(words):
            table[1 + place] = word
        table[0] = len(self._known)


class Deciding:
    """A worker's side. `word`: the fingerprint of the request that the worker is deciding, or 0 between requests.

    Code that continues with a request that has waited must call `again`, and clear `word` afterwards.
    """

    __slots__ = ("_headers", "_own", "_refused", "_running", "_seed", "_table", "_tried", "word")

    def __init__(
        self,
        word: memoryview,
        table: memoryview,
        tried: memoryview,
        *,
        seed: int = 0,
        headers: Sequence[str] = (),
        refused: Callable[[], object] = lambda: None,
        running: memoryview | None = None,
        own: int = 0,
    ) -> None:
        """`word`, `tried`: one int64, and `PLACES` int64, in this worker's area. `table`: the parent's words.

        `seed`: a secret. `headers`: the names of the headers that plugins read. `refused` is called for each refused request. `running`:
        the word that says which pool decides; None if the picker has one pool. `own`: the value of this word for this pool
        (`workers.shared.pool_crashes`).
        """
        self.word = word
        self._running = running
        self._own = own
        self._table = table
        self._tried = tried
        self._seed = seed & SEED_MASK
        self._headers = tuple(headers)
        self._refused = refused

    def hashing(self) -> xxh3_64:
        """Returns a hash object for the pieces of one body, to be added in order. Its `intdigest()` equals `digest` of the whole body."""
        return xxh3_64(seed=self._seed)

    def digest(self, body: bytes | memoryview) -> int:
        """Returns the hash of a whole body."""
        return xxh3_64_intdigest(body, self._seed)

    def begin(self, request: Request, digest: int, marked: bool) -> int:
        """Publishes and returns the fingerprint of the next request to decide. Raises Refused if the request is listed.

        `digest`: the digest of its body. `marked`: whether the request may have one of OWN_HEADERS.
        """
        read, names = request.path, self._headers
        if marked or names:
            headers = request.headers
            names = names + OWN_HEADERS if marked else names
            read = "\0".join([read, *[headers.get(name, "") for name in names]])
        # Compiled code is fast with `encode()`, which refuses surrogates.
        words = read.encode() if read.isascii() else read.encode("utf-8", "surrogatepass")
        suspect = ((digest ^ xxh3_64_intdigest(words, self._seed)) >> 1) or 1
        self.again(suspect)
        if self._table[0]:
            self._suspected(suspect)
        return suspect

    def again(self, suspect: int) -> None:
        """Publishes the fingerprint of a request with a decision that continues."""
        self.word[0] = suspect
        if self._running is not None:
            self._running[0] = self._own

    def _suspected(self, suspect: int) -> None:
        """Counts a watched request, and refuses a listed one."""
        for place, word in enumerate(self._table[1:WORDS].tolist()):
            if word == suspect:
                self._tried[place] += 1
            elif word == -suspect:
                self._refused()
                raise Refused(Cause.QUERY_OF_DEATH, f"{LISTED_S:.0f}")
