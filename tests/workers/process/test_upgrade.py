"""What the parent does for children of an earlier program that write to segments of their own."""

from pathlib import Path

import msgspec

from tests.workers.instances import made
from tests.workers.process.handovers import QUEUE, bundle, handover
from workers.process.instance import Instance
from workers.process.reports import Report
from workers.process.restart import Policy
from workers.process.upgrade import Upgrade

SUPERVISOR, FIRST, SECOND = 4710, 4711, 4712
HUNG_S = 60.0


def taken_over(instance: Instance, pids: dict[int, int], *, anew: bool) -> Upgrade:
    """The upgrade of a parent whose earlier program had a supervisor and two workers."""
    instance.begin(bundle(instance, QUEUE))
    for seat, pid in enumerate((SUPERVISOR, FIRST, SECOND)):
        instance.roll.started(seat, pid)
    sent = handover(instance)
    if anew:
        _, parts = sent.layouts["lanes"]
        sent = msgspec.structs.replace(sent, layouts={**sent.layouts, "lanes": (0, parts)})
    upgrade = Upgrade(instance, Policy(instance.layout.seats, 2), pids, None, ())
    assert upgrade.take_over(sent) == {0, 1, 2}
    return upgrade


def test_workers_of_an_earlier_program_count_as_serving_until_they_end(tmp_path: Path) -> None:
    with made(tmp_path, QUEUE) as instance:
        pids: dict[int, int] = {}
        upgrade = taken_over(instance, pids, anew=True)
        counts = [instance.words.earlier_workers]
        for pid in (SUPERVISOR, FIRST, SECOND):
            pids.pop(pid)
            upgrade.excused([0.0] * 3)
            counts.append(instance.words.earlier_workers)
        assert counts == [2, 2, 1, 0]


def test_workers_that_share_the_memory_are_judged_by_their_lanes(tmp_path: Path) -> None:
    with made(tmp_path, QUEUE) as instance:
        upgrade = taken_over(instance, {}, anew=False)
        assert instance.words.earlier_workers == 0
        assert upgrade.excused([HUNG_S] * 3) == [HUNG_S] * 3


def test_a_later_child_with_the_pid_of_an_earlier_one_is_judged_and_heard(tmp_path: Path) -> None:
    with made(tmp_path, QUEUE) as instance:
        pids: dict[int, int] = {}
        upgrade = taken_over(instance, pids, anew=True)
        report = Report(1, FIRST, generation=8)
        assert upgrade.excused([HUNG_S] * 3) == [0.0] * 3
        assert upgrade.ignores(report)
        pids.pop(FIRST)
        upgrade.excused([HUNG_S] * 3)
        pids[FIRST] = 1
        assert upgrade.excused([HUNG_S] * 3) == [0.0, HUNG_S, 0.0]
        assert not upgrade.ignores(report)
