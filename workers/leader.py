"""Who of several pickers leads: the rules of a lease as a state machine that reads no clock and asks nobody.

A lease is a record on a server that takes a change only from who knows the record's last version. One picker holds it and renews
it; the others watch it.

    what was seen, and when  ─▶  Election  ─▶  does it lead at `now`?    what is to be done: Read | Write | Wait | Done

- `now` comes from a clock that only goes forward, and at its own pace in each picker. Wall time is in the record for people.
- A leader leads until `renew_s` after it *sent* the last renewal that was confirmed. This is a comparison whenever somebody asks, no
  timer: a process that stood still in between does not lead when it goes on.
- A candidate takes a lease that it has not *seen* change for as long as its holder promised (`lease_s`), or that has no holder.
- So a leader has stopped `lease_s - renew_s` before anybody else begins, however late messages come; pickers' clocks may run at rates
  that differ by a factor of `lease_s / renew_s`.
- What became of a write without an answer is unknown, so the lease is read again. A write that comes too late changes nothing: its
  version is not the last one.
- A lease that vanishes is not free but as it was seen last; whoever has never seen it makes a new one at once. So only who
  deletes a lease while a picker starts can have two leaders, until the first renews.
- The successor of a killed process has its identity, goes on leading for as long as the predecessor would have, and renews.
"""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

NEVER: Final = -math.inf


class Times(NamedTuple):
    """Seconds, as the field's other pickers have them."""

    lease_s: float = 15.0  # promised to others with each renewal
    renew_s: float = 10.0  # how long a leader trusts its last renewal
    retry_s: float = 2.0  # between renewals, and between looks at another's lease
    jitter: float = 0.2  # of `retry_s`, for looks: candidates should not come all at once
    lease_s_max: float = 600.0  # of a promise that is believed

    @property
    def request_s(self) -> float:
        """How long to wait for an answer: a leader can try twice before its time is over."""
        return (self.renew_s - self.retry_s) / 2


TIMES: Final = Times()


class Lease(NamedTuple):
    """A lease's record. `version` is the server's, "" where there is no record; `acquired` and `renewed` are wall time, for people."""

    version: str = ""
    holder: str = ""
    promised_s: float = 0.0
    transitions: int = 0
    acquired: str = ""
    renewed: str = ""


class Read(NamedTuple):
    """Ask the server for the lease."""


class Write(NamedTuple):
    """Change `before` so that `holder` has it; create it if it has no version."""

    before: Lease
    holder: str
    promised_s: float
    transitions: int


class Wait(NamedTuple):
    """Nothing to do before `until`."""

    until: float


class Done(NamedTuple):
    """Nothing is to be done any more."""


Action = Read | Write | Wait | Done


class Election:
    """One picker's part in it. `leads_until` is what a predecessor with the same identity left."""

    def __init__(
        self,
        identity: str,
        times: Times = TIMES,
        *,
        leads_until: float = NEVER,
        random: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.identity = identity
        self.times = times
        self.leads_until = leads_until
        self._random = random
        self._seen: Lease | None = None  # None: never looked
        self._changed_at = NEVER  # when we saw it change
        self._current = False  # whether `_seen` is what the server had when it last answered
        self._not_before = NEVER  # of the next action
        self._look_at = NEVER  # again at another's lease
        self._resigned = False

    def leads(self, now: float) -> bool:
        """Whether nobody else can lead at `now`."""
        return now < self.leads_until

    @property
    def holder(self) -> str:
        """Who had the lease when it was seen last; "": nobody, or it was not seen yet."""
        return self._seen.holder if self._seen is not None else ""

    @property
    def looked(self) -> bool:
        """Whether the server has answered at all."""
        return self._seen is not None

    def decide(self, now: float) -> Action:
        """What is to be done at `now`; its outcome is told to one of the methods below."""
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
        """The server's answer to a read; None: there is no such lease."""
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
        """A write that was sent at `sent` is confirmed."""
        self._seen, self._current = lease, True
        self._changed_at = now
        self._not_before = now if self._resigned else sent + self.times.retry_s
        if lease.holder == self.identity and not self._resigned:
            self.leads_until = sent + self.times.renew_s

    def conflicted(self, now: float) -> None:
        """Somebody else has changed the lease since it was read: look at once, but not in step with him."""
        self._current = False
        self._not_before = now + self.times.retry_s * self.times.jitter * self._random()

    def failed(self, sent: float, now: float) -> None:
        """No answer to what was sent at `sent`, or one that says nothing about the lease."""
        self._current = False
        hurry = 0.1 if self._resigned else 1.0  # there is little time left to give it back
        self._not_before = max(now, sent + hurry * self.times.retry_s)

    def look(self, now: float) -> None:
        """Something may have changed: look at another's lease now. What is due anyway is not hurried."""
        if self._seen is not None and self._seen.holder != self.identity:
            self._look_at = min(self._look_at, now)

    def resign(self, now: float) -> None:
        """Lead no more, and give the lease back."""
        self._resigned = True
        self.leads_until = NEVER
        self._not_before = now

    def _free_at(self, lease: Lease) -> float:
        if not lease.holder:
            return NEVER
        return self._changed_at + (min(lease.promised_s, self.times.lease_s_max) or self.times.lease_s)

    def _vanished(self) -> Lease:
        """The lease without a record: its holder has not given it back."""
        seen = self._seen
        if seen is None or not seen.holder:
            return Lease()
        return seen._replace(version="")
