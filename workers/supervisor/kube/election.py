"""Elects a leader among pickers by the rules of a lease, as a state machine that reads no clock and sends no request.

A lease is a record on a server. The server accepts a change only from a client that knows the last version of the record. One picker
holds the lease and renews it; the other pickers watch it.

    what was seen, and when  ─▶  Election  ─▶  does it lead at `now`?    the next action: Read | Write | Wait | Done

- `now` comes from a monotonic clock, which may run at a different rate in each picker. The record has wall time for people only.
- A leader leads until `renew_s` after it *sent* the last renewal that was confirmed. `leads` compares times and sets no timer: a
  process that was suspended past this time does not lead when it resumes.
- Another picker takes a lease without a holder, or one that it has not *seen* change for as long as the holder promised (`lease_s`).
- So a leader stops at least `lease_s - renew_s` before another picker begins, however late messages arrive. The clocks of the pickers
  may run at rates that differ by a factor of `lease_s / renew_s`.
- The outcome of a write without an answer is unknown, so the picker reads the lease again. A write that arrives too late changes
  nothing, because its version is outdated.
- A lease that vanishes is not free: the picker treats it as it was last seen. A picker that has never seen it creates a new one at
  once. So there can be two leaders only if the lease is deleted while a picker starts, and only until the first leader renews.
- The successor of a killed process has the same identity. It leads for as long as its predecessor would have, and renews.
"""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

NEVER: Final = -math.inf


class Times(NamedTuple):
    """The times of an election in seconds. The defaults are those of the reference picker."""

    lease_s: float = 15.0  # the time for which each renewal promises to hold the lease
    renew_s: float = 10.0  # the time for which a leader relies on its last renewal
    retry_s: float = 2.0  # the pause between renewals, and between reads of another picker's lease
    jitter: float = 0.2  # random part of the pause between reads, as a share of `retry_s`: not all pickers read at once
    lease_s_max: float = 600.0  # a longer promise of another picker is treated as this

    @property
    def request_s(self) -> float:
        """How long to wait for an answer: so short that a leader can try twice before its time is over."""
        return (self.renew_s - self.retry_s) / 2


TIMES: Final = Times()


class Lease(NamedTuple):
    """The record of a lease.

    `version`: the version on the server, or "" without a record. `promised_s`: how long the holder promises to hold the lease after each
    renewal, in seconds. `acquired` and `renewed`: wall time, for people only.
    """

    version: str = ""
    holder: str = ""
    promised_s: float = 0.0
    transitions: int = 0
    acquired: str = ""
    renewed: str = ""


class Read(NamedTuple):
    """Tells the caller to read the lease from the server."""


class Write(NamedTuple):
    """Tells the caller to change the record `before` so that `holder` holds the lease, or to create it if `before` has no version."""

    before: Lease
    holder: str
    promised_s: float
    transitions: int


class Wait(NamedTuple):
    """Tells the caller to do nothing before `until`."""

    until: float


class Done(NamedTuple):
    """Tells the caller that the election is over for this picker."""


Action = Read | Write | Wait | Done


class Election:
    """Decides for one picker what it does in the election. All times are seconds on its monotonic clock."""

    def __init__(
        self, identity: str, times: Times = TIMES, *, leads_until: float = NEVER, random: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`leads_until`: the time until which a predecessor with the same identity leads; NEVER if the predecessor does not lead.

        `random`: returns numbers from 0 to 1, for the jitter.
        """
        self.identity = identity
        self.times = times
        self.leads_until = leads_until
        self._random = random
        self._seen: Lease | None = None  # None before the first read
        self._changed_at = NEVER  # when this picker last saw the record change
        self._current = False  # whether `_seen` is the record of the server's last answer
        self._not_before = NEVER  # the earliest time of the next action
        self._look_at = NEVER  # when to read another picker's lease again
        self._resigned = False

    def leads(self, now: float) -> bool:
        """Whether this picker leads at `now`. If so, no other picker can, with the one exception that the module's docstring names."""
        return now < self.leads_until

    @property
    def holder(self) -> str:
        """The holder of the lease when it was last seen; "" without a holder, or before the first read."""
        return self._seen.holder if self._seen is not None else ""

    @property
    def looked(self) -> bool:
        """Whether the server has answered a read at least once."""
        return self._seen is not None

    def decide(self, now: float) -> Action:
        """Returns the action to take at `now`. The caller reports the outcome: calls `saw`, `wrote`, `conflicted` or `failed`."""
        if self._resigned and self._seen is not None and self._current and self._seen.holder != self.identity:
            return Done()
        if now < self._not_before:
            return Wait(self._not_before)
        seen = self._seen
        if seen is None or not self._current:
            return Read()
        if self._resigned:
            return Write(seen, "", 1.0, seen.transitions)
        if seen.holder == self.identity:
            return Write(seen, self.identity, self.times.lease_s, seen.transitions)
        if now >= (free_at := self._free_at(seen)):
            return Write(seen, self.identity, self.times.lease_s, seen.transitions + bool(seen.version))
        return Wait(min(free_at, self._look_at)) if now < self._look_at else Read()

    def saw(self, lease: Lease | None, now: float) -> None:
        """Records that the server answered a read with `lease`, or None if there is no such lease."""
        if lease is None:
            lease = self._vanished()
        if self._seen is None or lease._replace(version="") != self._seen._replace(version=""):
            self._changed_at = now
        self._seen, self._current = lease, True
        self._not_before = now
        self._look_at = now + self.times.retry_s * (1 + self.times.jitter * self._random())
        if lease.holder != self.identity:
            self.leads_until = NEVER

    def wrote(self, lease: Lease, sent: float, now: float) -> None:
        """Records that the server confirmed a write that was sent at `sent`."""
        self._seen, self._current = lease, True
        self._changed_at = now
        self._not_before = now if self._resigned else sent + self.times.retry_s
        if lease.holder == self.identity and not self._resigned:
            self.leads_until = sent + self.times.renew_s

    def conflicted(self, now: float) -> None:
        """Records that the server refused a write, because another picker has changed the lease since it was read.

        The next read comes after a random pause, so that both pickers do not collide again.
        """
        self._current = False
        self._not_before = now + self.times.retry_s * self.times.jitter * self._random()

    def failed(self, sent: float, now: float) -> None:
        """Records that a request that was sent at `sent` had no answer, or an answer without the state of the lease."""
        self._current = False
        hurry = 0.1 if self._resigned else 1.0  # little time is left to give the lease back
        self._not_before = max(now, sent + hurry * self.times.retry_s)

    def look(self, now: float) -> None:
        """Makes the next read of another picker's lease due now, because the lease may have changed.

        If this picker leads, its next renewal stays due at the same time.
        """
        if self._seen is not None and self._seen.holder != self.identity:
            self._look_at = min(self._look_at, now)

    def resign(self, now: float) -> None:
        """Stops leading at once, and makes `decide` give the lease back."""
        self._resigned = True
        self.leads_until = NEVER
        self._not_before = now

    def _free_at(self, lease: Lease) -> float:
        if not lease.holder:
            return NEVER
        return self._changed_at + (min(lease.promised_s, self.times.lease_s_max) or self.times.lease_s)

    def _vanished(self) -> Lease:
        """Returns the lease for a record that has vanished. The lease keeps its holder, because the holder has not given it back."""
        seen = self._seen
        if seen is None or not seen.holder:
            return Lease()
        return seen._replace(version="")
