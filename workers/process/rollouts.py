"""Decides how the pools of a picker change their configurations: each pool has its own `Rollout`. Does nothing itself.

    command about a pool ─▶ its Rollout
    reload of all        ─▶ the Rollout of the list of pools: its trial tells which pools have changed ─▶ their Rollouts ─▶ one answer

Like `Rollout`, this module does no I/O and reads no clock. The key of a configuration is the number of its pool, or a number for the list
of pools.

- There is one trial child at a time, because each trial builds on the names to which the last trial has given places in shared memory.
  Pools take turns, so a pool waits for at most one trial of each other pool.
- A crash is counted against the pool for which the child was deciding. If this pool is not known, the crash is counted against every pool
  that has changed a short time before.
- While the list of pools changes, no pool begins a trial, and while a pool has a trial, the list begins none. So the pool of a trial cannot
  go away.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple

from workers.process.rollout import RELOAD, Action, Asked, Crashed, Event, Idle, Rollout, Say, Spreading, Tick

Told = tuple[int, Action]  # the key of a configuration, and what to do for it
UNCHANGED: Final = "unchanged"
GONE: Final = "the pool is gone"


class ReloadResult(NamedTuple):
    """How the reload of a pool ended. `said` is None if the pool has not changed or is gone; then `text` says which."""

    said: Say | None
    text: str = ""


class Round(NamedTuple):
    """A reload of all pools. `wanted`: by pool, the number of answered asks at which its reload has ended. `ended`: the results of the
    pools with an ended reload.
    """

    wanted: dict[int, int]
    ended: dict[int, ReloadResult]


class Answered(NamedTuple):
    """Tells that a reload of all pools has ended. `said`: how the reload of the list ended. `results`: the results of the pools, if the
    list is good.
    """

    said: Say
    results: Mapping[int, ReloadResult]


class Rollouts:
    """The rollouts of one picker by key. `listed`: the key of the list of pools; None if the picker has one pool, and so no list."""

    def __init__(self, listed: int | None = None) -> None:
        self.listed = listed
        self.members: dict[int, Rollout] = {}
        self.round: Round | None = None  # a reload of all pools, once their list is known
        self._begun = False  # whether the reloads of the round's pools have begun
        self.answers: list[Answered] = []  # ended reloads of all pools; the caller removes them
        self._last = -1  # the key that had the turn last

    def add(self, key: int, rollout: Rollout) -> None:
        """Adds a configuration."""
        self.members[key] = rollout

    def drop(self, key: int) -> None:
        """Forgets the configuration of a pool that is gone. Commands that wait for it get an answer."""
        self.members.pop(key, None)
        if self.round is not None and self.round.wanted.pop(key, None) is not None:
            self.round.ended[key] = ReloadResult(None, GONE)
            if self._begun:
                self._look_at_round()

    def on(self, key: int, event: Event, now: float) -> list[Told]:
        """Returns the actions after an event about one configuration. Returns no action if the configuration is gone."""
        rollout = self.members.get(key)
        if rollout is None:
            return []
        answered = rollout.said.answered
        told = [(key, action) for action in rollout.on(event, now)]
        if rollout.said.answered > answered:
            self._answered(key, rollout.said)
        return told

    def crashed(self, child: str, now: float, key: int | None) -> list[Told]:
        """Returns the actions after the crash of a child. `key`: the pool for which the child was deciding; None if it is not known."""
        blamed = [key] if key is not None else list(self.members)
        return [told for each in blamed for told in self.on(each, Crashed(child), now)]

    def tick(self, now: float, behind: Callable[[int], tuple[int, ...]]) -> list[Told]:
        """Returns the due actions. `behind(key)`: the ordinals of processes that do not use what was published."""
        told: list[Told] = []
        for key in self._in_turn():
            rollout = self.members[key]
            if rollout.next_deadline(now, waits=self._waits(key)) > 0.0 and not isinstance(rollout.state, Spreading):
                continue
            ordinals = behind(key) if isinstance(rollout.state, Spreading) else ()
            told += self.on(key, Tick(ordinals, self._waits(key)), now)
            if rollout.tries:
                self._last = key
        return told

    def next_deadline(self, now: float) -> float:
        """Returns the seconds until `tick` is needed, if no event comes before."""
        return min((rollout.next_deadline(now, waits=self._waits(key)) for key, rollout in self.members.items()), default=math.inf)

    def follow(self, changed: Collection[int], unchanged: Collection[int]) -> None:
        """Notes which pools have changed. The trial of the list has found this, and is about to end. When the list is in force, these
        pools are reloaded.
        """
        self._begun = False
        self.round = Round(dict.fromkeys(changed, 0), {key: ReloadResult(None, UNCHANGED) for key in unchanged})

    def reload_changed(self, now: float) -> list[Told]:
        """Begins the reloads of the pools that have changed. The caller has added all of them before."""
        told: list[Told] = []
        assert self.round is not None
        self._begun = True
        for key in list(self.round.wanted):
            rollout = self.members.get(key)
            if rollout is None:
                self.round.ended[key] = ReloadResult(None, GONE)
                del self.round.wanted[key]
                continue
            # A trial that runs already may have read older files.
            self.round.wanted[key] = 1 + rollout.said.answered + rollout.said.owed
            told += self.on(key, Asked(RELOAD), now)
        self._look_at_round()
        return told

    def _answered(self, key: int, said: Say) -> None:
        """Acts on the answer to a command."""
        if key == self.listed:
            if not (said.successful and self.round is not None):
                self.round = None
                self.answers.append(Answered(said, {}))
        elif self.round is not None and 0 < self.round.wanted.get(key, 0) <= said.answered:
            del self.round.wanted[key]
            self.round.ended[key] = ReloadResult(said)
            self._look_at_round()

    @property
    def due(self) -> bool:
        """Whether the list has changed as asked, so that `reload_changed` is due."""
        if self.round is None or self._begun or self.listed is None or self._busy(self.listed):
            return False
        return self.members[self.listed].said.successful

    def _look_at_round(self) -> None:
        assert self.round is not None
        assert self.listed is not None
        if not self.round.wanted:
            self.answers.append(Answered(self.members[self.listed].said, self.round.ended))
            self.round = None

    def _busy(self, key: int) -> bool:
        rollout = self.members[key]
        return rollout.tries or not isinstance(rollout.state, Idle)

    def _waits(self, key: int) -> bool:
        """Whether this configuration may begin no trial now."""
        if key == self.listed:
            return self.round is not None or any(each.tries for other, each in self.members.items() if other != key)
        if self.listed is not None and self._busy(self.listed):
            return True
        return any(each.tries for other, each in self.members.items() if other != key)

    def _in_turn(self) -> list[int]:
        """Returns all keys, beginning after the one that had the turn last."""
        keys = sorted(self.members)
        return [key for key in keys if key > self._last] + [key for key in keys if key <= self._last]
