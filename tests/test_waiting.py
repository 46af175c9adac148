"""Tests wait for conditions, turns of the loop or virtual time. The tests of the workers hardly sleep, and say why where they do."""

import asyncio
import re
from pathlib import Path

import pytest

from tests import waiting
from tests.waiting import BEGIN_S, elapse, in_virtual_time, until, wait_until

WORKERS = Path(__file__).parent / "workers"
SLEEPS_MAX = 20


def test_the_tests_of_the_workers_hardly_sleep_and_say_why_above() -> None:
    sleeps, unexplained = 0, []
    for path in sorted(WORKERS.glob("**/*.py")):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if re.search(r"\bsleep\(", line):
                sleeps += 1
                if not lines[number - 1].lstrip().startswith("# "):
                    unexplained.append(f"{path.relative_to(WORKERS)}:{number + 1}")
    assert unexplained == [], "use tests.waiting, or say above why nothing can be waited for"
    assert sleeps <= SLEEPS_MAX


def test_until_returns_what_has_happened_and_names_what_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = iter(([], [], ["seen"]))
    assert asyncio.run(until(lambda: next(tries))) == ["seen"]
    assert wait_until(lambda: 7) == 7
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.0)
    with pytest.raises(AssertionError, match="not within 0 s: rain"):
        asyncio.run(until(lambda: False, "rain"))
    with pytest.raises(AssertionError, match="not within 0 s: rain"):
        wait_until(lambda: False, "rain")


def test_virtual_time_passes_at_once_and_only_in_a_loop_of_its_own() -> None:
    async def day() -> float:
        await elapse(86_400.0)
        return asyncio.get_running_loop().time()

    assert in_virtual_time(day) == BEGIN_S + 86_400.0
    with pytest.raises(AssertionError, match="wait for a condition"):
        asyncio.run(day())


def test_virtual_time_ends_a_test_in_which_nothing_will_ever_happen() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(AssertionError, match="nothing will ever happen"):
        in_virtual_time(forever)
