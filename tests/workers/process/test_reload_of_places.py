"""A pool goes away while its configuration is tried: the parent's side alone, with trial children that the test plays."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from epp.config.load import load
from loadtest.demo.ports import free_ports
from shm.documents import DocumentReader
from tests.workers.instances import options, removed
from workers.process import fork
from workers.process.asks import Ask
from workers.process.generations import Attempt, Bundle, Given, TrialResult
from workers.process.instance import Instance
from workers.process.places import DEFAULT, Places, Pool
from workers.process.pool_views import create_places, tell_assigned
from workers.process.reload import Reloads
from workers.shared import reload_status
from workers.shared.documents import Placed

PLACE = 0
PID = 1 << 30  # no process has it


class World:
    """The `Reloads` of a parent with one place. `trials`: the trial children that the parent has not reaped, by process id."""

    def __init__(self, instance: Instance, places: Places) -> None:
        self.instance = instance
        self.killed: set[int] = set()
        self.trials: dict[int, Callable[[], int]] = {}
        self.reloads = Reloads(instance, self._accept, list)
        self._places = places
        self._pids = iter(range(PID, 2 * PID))
        self._running = 0
        self._reader = DocumentReader(instance.layout.status, instance.memory.reload)

    def spawn(self, _name: str, main: Callable[[], int], **_: object) -> int:
        pid = next(self._pids)
        self.trials[pid] = main
        return pid

    def kill(self, pid: int, _number: int) -> None:
        assert pid in self.trials, "a signal to a process that the parent has reaped"
        self.killed.add(pid)

    def _accept(self, instance: Instance, attempt: Attempt) -> int:
        """What a trial child does."""
        bundle = Bundle(attempt.number, "c.yaml", None, "", {}, attempt.names, 0.0)
        instance.generations.store(attempt.slot, TrialResult(self._running, "", bundle))
        return 0

    def assign(self, name: str) -> None:
        """The place gets the pool with this name."""
        tell_assigned(self.instance, {PLACE: Placed(name, self._places.ports[PLACE])})
        self.reloads.look(100.0)

    def reload(self, name: str) -> int:
        """An operator reloads a pool. Returns the process id of the trial child."""
        self.reloads.ask(Ask("reload", pool=name))
        self.reloads.look(100.0)
        return max(self.trials)

    def ends(self, pid: int) -> None:
        """A trial child ends, and the parent reaps it."""
        main = self.trials[pid]
        if pid not in self.killed:
            self._running = pid
            main()
        self.reloads.ends(pid)
        del self.trials[pid]
        assert self.reloads.ended(pid, -signal.SIGKILL if pid in self.killed else 0, 100.0), "it was a trial child"

    def status(self) -> reload_status.ReloadStatus:
        found = reload_status.read(self._reader, PLACE)
        assert found is not None
        return found


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    places = Places({DEFAULT: Pool(DEFAULT, Given(None, "", {}), load(None, ""), "", 4)}, free_ports(1), service="epp")
    with removed(create_places(options(tmp_path, pool_given=True), places)) as instance:
        made = World(instance, places)
        monkeypatch.setattr("workers.process.reload.fork", SimpleNamespace(TITLE=fork.TITLE, spawn=made.spawn, end_with=lambda _: None))
        monkeypatch.setattr(os, "kill", made.kill)
        monkeypatch.setattr(os, "killpg", made.kill)
        monkeypatch.setattr(os, "setpgid", lambda *_: None)
        yield made


def test_the_killed_trial_of_a_gone_pool_says_nothing_about_the_trial_of_the_pool_that_has_its_place(world: World) -> None:
    world.assign("llama")
    of_llama = world.reload("llama")
    world.assign("qwen")
    assert world.killed == {of_llama}
    of_qwen = world.reload("qwen")
    world.ends(of_llama)
    assert world.status().busy, "the trial of qwen still runs"
    number = world.instance.generations.of(PLACE).number
    world.ends(of_qwen)
    assert world.instance.generations.of(PLACE).number > number, "its result counts"


def test_a_killed_trial_of_a_gone_pool_may_end_before_the_pool_in_its_place_begins_one(world: World) -> None:
    world.assign("llama")
    of_llama = world.reload("llama")
    world.assign("qwen")
    world.reloads.ask(Ask("reload", pool="qwen"))
    world.ends(of_llama)
    assert world.status().successful
    world.ends(world.reload("qwen"))
    assert (world.status().successful, world.status().text) == (True, "")
