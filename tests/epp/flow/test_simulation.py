"""The deterministic simulation: what holds in thousands of worlds, that a seed replays, and that planted bugs are found.

More worlds: `python -m tests.epp.flow.simulation --seeds 100000 --jobs 2`.
"""

from collections.abc import Callable
from typing import Any

import pytest

from epp.flow import controller
from epp.flow.bands import Band
from epp.flow.controller import FlowController
from epp.flow.deadlines import Deadlines
from epp.flow.gate import PoolGate
from epp.flow.neighbours import Neighbours
from epp.flow.outcomes import Outcome
from epp.flow.registry import Registry
from tests.epp.flow import simulation
from tests.epp.flow.simulation import Result, simulate, simulate_block

BLOCK = 250
BLOCKS = 8


@pytest.mark.parametrize("first", range(0, BLOCK * BLOCKS, BLOCK))
def test_all_invariants_hold_after_every_step_of_every_world(first: int) -> None:
    *bad, summed = simulate_block(first, BLOCK)
    assert not bad, "\n".join(
        f"seed {each.seed}: {each.problem}; replay: python -m tests.epp.flow.simulation --first {each.seed} --trace"
        for each in bad
    )
    assert summed.steps > 30_000, "the worlds have become too quiet to show anything"


def test_the_worlds_see_every_outcome() -> None:
    outcomes = {name for seed in range(60) for name, _ in simulate(seed).outcomes}
    assert outcomes == {outcome.value for outcome in Outcome}


def test_a_seed_replays_identically() -> None:
    for seed in (3, 17, 101):
        once: list[str] = []
        again: list[str] = []
        assert simulate(seed, once) == simulate(seed, again)
        assert once == again
    assert simulate(3).trace != simulate(4).trace


def first_found(seeds: int) -> Result | None:
    return next((result for result in map(simulate, range(seeds)) if result.problem), None)


def patch(owner: Any, name: str, made: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Replaces a function by what `made` makes of it."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, made(getattr(owner, name)))


def no_credit(remove: Any) -> Any:
    def broken(self: Band, entry: Any, now: float) -> None:
        remove(self, entry, now)
        self.bytes += entry.bytes

    return broken


def ghost(left: Any) -> Any:
    def broken(self: FlowController, entry: Any) -> None:
        if entry.outcome is not None:
            left(self, entry)

    return broken


def never_expires(expired: Any) -> Any:
    return lambda self, now: expired(self, now)[:0]


def twice(ended: Any) -> Any:
    def broken(self: FlowController, entry: Any, outcome: Outcome, now: float) -> None:
        ended(self, entry, outcome, now)
        self._observer.ended(entry.flow, outcome, 0.0, 0)

    return broken


def always_room(room: Any) -> Any:
    return lambda self, priority: room(self, priority) or not self._load.empty


def old_reading(room: Any) -> Any:
    """What the others let through since is not counted."""

    def broken(self: PoolGate, priority: int) -> bool:
        if self._now() - self._read_at > 0.001:
            self._measure()
        return not self._load.empty and self._base < self._ceilings[priority]

    return broken


def pending_unseen(measure: Any) -> Any:
    def broken(self: PoolGate) -> None:
        measure(self)
        self._base, self._pending = round(self._load.saturation, 9), 0

    return broken


def upside_down(settle: Any) -> Any:
    def broken(self: Registry) -> None:
        settle(self)
        self.order = self.order[::-1]

    return broken


def equals_too(giving_way: Any) -> Any:
    return lambda priority, *rest: giving_way(priority + 1, *rest)


def half_enough(giving_way: Any) -> Any:
    """Somebody gives way although it is not enough."""
    return lambda priority, requests, size, holdings: giving_way(priority, min(requests, 1), 0, holdings)


def no_others(ahead: Any) -> Any:
    return lambda self, priority, claim, tolerance, now: False


def bands_alone(ahead: Any) -> Any:
    """Whose turn it is in the same band elsewhere is not looked at."""
    return lambda self, priority, claim, tolerance, now: ahead(self, priority, float("-inf"), tolerance, now)


def endless_patience(stuck: Any) -> Any:
    return lambda self, shard, now: stuck(self, shard, now) and False


def band_lost(provision: Any) -> Any:
    """A band that is not wanted any more is dropped with what waits in it."""

    def broken(self: Registry, priorities: Any) -> None:
        for priority in [p for p in self._bands if p not in set(self._plan.priorities(priorities))]:
            del self._bands[priority]
        provision(self, priorities)

    return broken


def unanswered(answer: Any) -> Any:
    return lambda self, now: None


def left_in_the_queue(shut_down: Any) -> Any:
    def broken(self: FlowController) -> None:
        self._closed = True

    return broken


def unsettled(settled: Any) -> Any:
    def broken(self: FlowController, *, placed: bool) -> None:
        if placed:
            settled(self, placed=placed)

    return broken


PLANTED = {
    "bytes of what is removed are not credited": patch(Band, "remove", no_credit),
    "a client that leaves is left in the queue": patch(FlowController, "_left", ghost),
    "nothing expires": patch(Deadlines, "expired", never_expires),
    "an end is counted twice": patch(FlowController, "_ended", twice),
    "the gate is always open": patch(PoolGate, "room", always_room),
    "a reading is believed for a millisecond": patch(PoolGate, "room", old_reading),
    "who has no endpoint yet is not counted": patch(PoolGate, "_measure", pending_unseen),
    "the lowest band goes first": patch(Registry, "_settle", upside_down),
    "equals give way": patch(controller, "giving_way", equals_too),
    "somebody gives way in vain": patch(controller, "giving_way", half_enough),
    "other shards are not looked at": patch(Neighbours, "ahead", no_others),
    "turns are not compared with those of other shards": patch(Neighbours, "ahead", bands_alone),
    "a shard that stands still is waited for": patch(Neighbours, "_stuck", endless_patience),
    "a band is dropped with what waits in it": patch(Registry, "provision", band_lost),
    "what others ask is not answered": patch(FlowController, "_answer", unanswered),
    "who waits at the end is not told": patch(FlowController, "shut_down", left_in_the_queue),
    "an end without endpoint stays pending": patch(FlowController, "settled", unsettled),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[bug](monkeypatch)
    found = first_found(400)
    assert found is not None, f"{bug}: not found"
    assert simulate(found.seed) == found, "it does not replay"


def test_the_command_prints_how_to_replay_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = Result(7, 1, 0, "at 0.1 s: wrong")
    monkeypatch.setattr(simulation, "simulate", lambda seed, trace=None: failed._replace(seed=seed))
    monkeypatch.setattr("sys.argv", ["simulation", "--first", "7", "--trace"])
    assert simulation.main() == 1
    assert "wrong" in capsys.readouterr().out
