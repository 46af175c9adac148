"""The deterministic simulation: invariants hold in thousands of worlds, seeds replay, and planted bugs are found.

More worlds: `python -m tests.epp.flow.simulation --seeds 100000 --jobs 2`.
"""

from collections.abc import Callable
from typing import Any

import pytest

from epp.flow import displacement
from epp.flow.bands import Band
from epp.flow.controller import FlowController
from epp.flow.deadlines import Deadlines
from epp.flow.gate import PoolGate
from epp.flow.outcomes import Outcome
from epp.flow.registry import Registry
from epp.flow.shard_order import ShardOrder
from tests.epp.flow import simulation
from tests.epp.flow.simulation import Result, simulate, simulate_block
from tests.examples import number
from tests.modes import interpreted_only

BLOCK = 100  # `.ci/run` simulates as many after these
BLOCKS = max(1, number(40) // 10)
RARE = {"a stalled shard is waited for": 200}  # the worlds before this one don't show the bug


@pytest.mark.parametrize("first", range(0, BLOCK * BLOCKS, BLOCK))
def test_all_invariants_hold_after_every_step_of_every_world_and_the_worlds_produce_every_outcome(first: int) -> None:
    *bad, summed = simulate_block(first, BLOCK)
    assert not bad, "\n".join(
        f"seed {each.seed}: {each.problem}; replay: python -m tests.epp.flow.simulation --first {each.seed} --trace" for each in bad
    )
    assert summed.steps > 150 * BLOCK, "the worlds have too few events to show anything"
    assert {name for name, _ in summed.outcomes} == {outcome.value for outcome in Outcome}


def test_a_seed_replays_identically() -> None:
    for seed in (3, 17, 101):
        once: list[str] = []
        again: list[str] = []
        assert simulate(seed, once) == simulate(seed, again)
        assert once == again
    assert simulate(3).trace != simulate(4).trace


def first_found(seeds: range) -> Result | None:
    return next((result for result in map(simulate, seeds) if result.problem), None)


def patch(owner: Any, name: str, broken: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Replaces a function by `broken(function)`."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, broken(getattr(owner, name)))


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
    """Ignores what other shards have let through since the reading."""

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
    """Displaces although that does not free enough."""
    return lambda priority, requests, size, holdings: giving_way(priority, min(requests, 1), 0, holdings)


def no_others(ahead: Any) -> Any:
    return lambda self, priority, claim, tolerance, now: False


def bands_alone(ahead: Any) -> Any:
    """Ignores the claims of the same band in other shards."""
    return lambda self, priority, claim, tolerance, now: ahead(self, priority, float("-inf"), tolerance, now)


def endless_patience(stuck: Any) -> Any:
    return lambda self, shard, now: stuck(self, shard, now) and False


def band_lost(provision: Any) -> Any:
    """Drops a band that is no longer named, with the requests that wait in it."""

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
    "the bytes of a removed request are not subtracted": patch(Band, "remove", no_credit),
    "a request stays in the queue after its client left": patch(FlowController, "_left", ghost),
    "nothing expires": patch(Deadlines, "expired", never_expires),
    "an outcome is counted twice": patch(FlowController, "_ended", twice),
    "the gate is always open": patch(PoolGate, "room", always_room),
    "a reading is trusted for a millisecond": patch(PoolGate, "room", old_reading),
    "a request without an endpoint is not counted": patch(PoolGate, "_measure", pending_unseen),
    "the lowest band goes first": patch(Registry, "_settle", upside_down),
    "equal requests give way": patch(displacement, "giving_way", equals_too),
    "a request is displaced in vain": patch(displacement, "giving_way", half_enough),
    "other shards are ignored": patch(ShardOrder, "ahead", no_others),
    "claims are not compared with those of other shards": patch(ShardOrder, "ahead", bands_alone),
    "a stalled shard is waited for": patch(ShardOrder, "_stuck", endless_patience),
    "a band is dropped with the requests that wait in it": patch(Registry, "provision", band_lost),
    "demands of other shards are not answered": patch(FlowController, "_answer", unanswered),
    "requests that wait at the shut-down get no outcome": patch(FlowController, "shut_down", left_in_the_queue),
    "a request that ended without an endpoint stays pending": patch(FlowController, "settled", unsettled),
}


@interpreted_only("plants bugs by replacing methods")
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[bug](monkeypatch)
    found = first_found(range(RARE.get(bug, 0), 400))
    assert found is not None, f"not found: {bug}"
    assert simulate(found.seed) == found, "it does not replay"


def test_the_command_prints_how_to_replay_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failed = Result(7, 1, 0, "at 0.1 s: wrong")
    monkeypatch.setattr(simulation, "simulate", lambda seed, trace=None: failed._replace(seed=seed))
    monkeypatch.setattr("sys.argv", ["simulation", "--first", "7", "--trace"])
    assert simulation.main() == 1
    assert "wrong" in capsys.readouterr().out
