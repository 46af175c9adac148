"""Changes of the configuration in every order: the parent's side alone, with children and trials that the test plays."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from epp.decision.tryout import Share
from shm.documents import DocumentReader
from tests.workers.instances import made
from workers.process import fork
from workers.process.asks import Ask
from workers.process.generations import Attempt, Bundle, TrialResult
from workers.process.instance import Instance
from workers.process.layout import CANDIDATE, GENERATION
from workers.process.reload import Reloads
from workers.process.reports import Report
from workers.process.rollout import CRASHES, SPREAD_S, TRIAL_S, WATCH_S
from workers.shared import reload_status
from workers.shared.reload_status import ReloadStatus

QUEUE = "plugins: [{type: queue-scorer}]\n"
ORDINALS = 3
PID = 1 << 30  # no process has it
CRASHED = -signal.SIGSEGV
ROUNDS = 800
STEPS = 60


class World:
    """One parent's `Reloads`, with children in ORDINALS ordinals and at most one trial child. `text`: what the files hold."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.now = 100.0
        self.text = "first"
        instance.begin(Bundle(1, "c.yaml", self.text, "", {}, instance.layout.names, 0.0))
        self.reloads = Reloads(instance, self._offer, list)
        self._reader = DocumentReader(instance.layout.status, instance.memory.reload)
        self._pids = iter(range(PID, 2 * PID))
        self.trial: Callable[[], int] | None = None
        self.pid = 0
        self.killed: set[int] = set()
        self.reaped: set[int] = set()
        self._verdict = ""
        for ordinal in range(ORDINALS):
            self.starts(ordinal)

    def spawn(self, _name: str, main: Callable[[], int], **_: object) -> int:
        assert self.trial is None, "two trials at a time"
        self.trial, self.pid = main, next(self._pids)
        return self.pid

    def kill(self, pid: int, _number: int) -> None:
        assert pid not in self.reaped, "a signal to a process that the parent has reaped"
        self.killed.add(pid)

    def _offer(self, instance: Instance, attempt: Attempt) -> int:
        """What a trial child does."""
        if self._verdict:
            instance.generations.store(attempt.slot, TrialResult(self.pid, self._verdict))
            return 0
        text = self.text if attempt.ask.what == "reload" else attempt.ask.text
        bundle = Bundle(attempt.number, "c.yaml", text, "", {}, attempt.names, self.now)
        instance.generations.store(attempt.slot, TrialResult(self.pid, "", bundle))
        return 0

    # Events

    def turn(self, seconds: float = 0.1) -> None:
        self.now += seconds
        self.reloads.look(self.now)

    def asks(self, what: str, text: str = "") -> None:
        """A command of the operator."""
        self.reloads.ask(Ask(what, text, "d.yaml", Share()))  # type: ignore[arg-type]

    def reload(self, text: str) -> None:
        self.text = text
        self.reloads.ask()

    def writes(self, verdict: str = "") -> None:
        """The trial child writes its result, and runs on."""
        assert self.trial is not None
        self._verdict = verdict
        self.trial()

    def ends(self, code: int = 0) -> None:
        """The trial child ends, and the parent reaps it."""
        self.trial, pid = None, self.pid
        self.reloads.ends(pid)
        self.reaped.add(pid)
        assert self.reloads.ended(pid, -signal.SIGKILL if pid in self.killed else code, self.now)

    def adopts(self, ordinal: int) -> None:
        """A child takes over what the parent's words name, if its bytes are there."""
        scalars = self._scalars(ordinal)
        generations = self.instance.generations
        scalars[GENERATION] = generations.current().number
        scalars[CANDIDATE] = generations.candidate().number if ordinal and generations.candidate_number else 0

    def refuses(self, ordinal: int, number: int) -> None:
        self.reloads.heard(Report(ordinal, 1, "no", generation=number), f"child {ordinal}", self.now)

    def crashes(self, ordinal: int) -> None:
        self.instance.memory.areas.set_serving(ordinal, False)
        self.reloads.lost(f"child {ordinal}", CRASHED, self.now, hung=False)

    def starts(self, ordinal: int) -> None:
        self.adopts(ordinal)
        self.instance.memory.areas.set_serving(ordinal, True)

    def crash(self, times: int = CRASHES) -> None:
        for _ in range(times):
            self.crashes(1)
            self.starts(1)

    def settle(self) -> None:
        """Lets every process do what it has to, until nothing changes any more."""
        for _ in range(200):
            if self.trial is not None and self.pid not in self.killed:
                self.writes()
            if self.trial is not None:
                self.ends()
            for ordinal in range(ORDINALS):
                self.starts(ordinal)
            self.turn()
            if not self.status().busy and self.reloads.next_deadline(self.now) > 0.0:
                return
        raise AssertionError("it never ends")

    # What can be seen

    def status(self) -> ReloadStatus:
        found = reload_status.read(self._reader)
        assert found is not None
        return found

    def used(self) -> list[int]:
        return [int(number) for number in self.instance.memory.areas.scalars(GENERATION)[:ORDINALS]]

    def in_force(self) -> str | None:
        return self.instance.generations.current().text

    def _scalars(self, ordinal: int) -> "Scalars":
        return Scalars(self.instance, ordinal)


class Scalars:
    """The scalars of one area by name."""

    def __init__(self, instance: Instance, ordinal: int) -> None:
        self._area = instance.memory.areas.area(ordinal)

    def __setitem__(self, name: str, value: int) -> None:
        self._area.scalars[self._area.schema.scalar[name]] = value


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with made(tmp_path, QUEUE) as instance:
        made_world = World(instance)
        monkeypatch.setattr(
            "workers.process.reload.fork", SimpleNamespace(TITLE=fork.TITLE, spawn=made_world.spawn, end_with=lambda _: None)
        )
        monkeypatch.setattr(os, "kill", made_world.kill)
        monkeypatch.setattr(os, "killpg", made_world.kill)
        monkeypatch.setattr(os, "setpgid", lambda *_: None)
        yield made_world


def in_force_everywhere(world: World, text: str) -> None:
    """Asserts that all processes use this configuration, and that the status says so."""
    bundle = world.instance.generations.current()
    assert bundle.text == text
    assert world.used() == [bundle.number] * ORDINALS
    status = world.status()
    assert (status.generation, status.hash, status.busy) == (bundle.number, bundle.hash, False)


def test_a_rollback_during_a_trial_takes_neither_its_file_nor_its_number(world: World) -> None:
    world.reload("bad")
    world.settle()
    in_force_everywhere(world, "bad")
    answered = world.status().answered
    world.reload("better")
    world.turn()
    assert world.trial is not None
    world.crash()
    assert world.in_force() == "first"
    number = world.instance.generations.number
    world.writes()  # it was about to do so when the parent killed it
    assert world.in_force() == "first", "the trial has overwritten the configuration in force"
    assert world.status().busy
    world.ends()
    for ordinal in range(ORDINALS):
        world.adopts(ordinal)
    assert world.used() == [number] * ORDINALS
    world.settle()
    in_force_everywhere(world, "better")
    status = world.status()
    assert status.generation > number, "a number names one configuration for ever"
    assert (status.answered, status.successful) == (answered + 1, True), "the reload gets one answer"


def test_an_ended_trial_is_made_again_if_a_rollback_comes_before_its_spread(world: World) -> None:
    world.reload("bad")
    world.settle()
    world.asks("try", "candidate")
    world.turn()
    world.writes()
    world.crash()
    world.ends()
    assert world.instance.generations.candidate_number == 0, "it was tried beside a configuration that is no longer in force"
    world.settle()
    in_force_everywhere(world, "first")
    assert world.instance.generations.candidate().text == "candidate"
    tried = world.status().tryout
    assert tried is not None and tried.generation == world.instance.generations.candidate_number


def test_a_trial_that_hangs_after_a_rollback_is_killed_and_its_reload_refused(world: World) -> None:
    world.reload("bad")
    world.settle()
    world.reload("hangs")
    world.turn()
    world.crash()
    world.ends()
    for ordinal in range(ORDINALS):
        world.adopts(ordinal)
    for _ in ("the spread ends", "the trial is made again"):
        world.turn()
    assert world.trial is not None and world.pid not in world.killed
    world.turn(TRIAL_S)
    assert world.pid in world.killed
    world.ends()
    in_force_everywhere(world, "first")
    assert "it took more than 10 s" in world.status().text


def test_five_equal_reloads_leave_the_configuration_before_them_to_go_back_to(world: World) -> None:
    for _ in range(6):
        world.reload("bad")
        world.settle()
    in_force_everywhere(world, "bad")
    world.asks("rollback")
    world.settle()
    in_force_everywhere(world, "first")
    world.asks("rollback")
    world.settle()
    assert "there is no good one before it" in world.status().text
    in_force_everywhere(world, "first")


def test_a_configuration_that_does_not_spread_is_taken_back_while_another_reload_waits(world: World) -> None:
    world.reload("slow")
    world.turn()
    world.writes()
    world.ends()
    world.reload("next")
    world.turn(SPREAD_S)
    assert world.in_force() == "first"
    world.settle()
    in_force_everywhere(world, "next")


def test_a_configuration_that_must_stay_is_said_once_and_refuses_a_candidate_until_all_use_it(world: World) -> None:
    world.reload("first")
    world.turn()
    world.writes()
    world.ends()
    world.starts(0)
    world.starts(2)
    for _ in range(2):
        world.refuses(1, 2)
    status = world.status()
    assert (status.generation, status.finished, status.successful, status.busy) == (2, 1, False, False)
    assert "generation 2 stays: there is no good one before it (child 1 cannot use it: no)" in status.text
    world.asks("try", "candidate")
    world.turn()
    world.writes()
    world.ends()
    for ordinal in (0, 2):
        world.adopts(ordinal)
    world.turn(SPREAD_S)
    assert "processes in ordinals [1] do not use it" in world.status().text
    world.settle()
    in_force_everywhere(world, "first")


def test_a_rollback_of_a_candidate_ends_when_no_worker_uses_it(world: World) -> None:
    world.asks("try", "candidate")
    world.settle()
    world.asks("rollback")
    world.turn()
    world.adopts(1)
    world.turn()
    assert (world.status().busy, world.status().tryout) == (True, None)
    world.adopts(2)
    world.turn()
    status = world.status()
    assert (status.busy, status.successful, status.text) == (False, True, "candidate 2 is taken back: epp config rollback")


@pytest.mark.parametrize("part", range(4))
def test_after_any_order_of_events_all_processes_use_one_configuration_and_the_status_is_true(world: World, part: int) -> None:
    """A number names one configuration for ever; what is in force is always readable; a success is said only if all use it."""
    contents: dict[int, str | None] = {1: "first"}
    for seed in range(part * ROUNDS // 4, (part + 1) * ROUNDS // 4):
        rng = random.Random(seed)
        for _ in range(rng.randrange(1, STEPS)):
            step(world, rng)
            seen(world, contents)
        world.turn(WATCH_S)
        world.settle()
        seen(world, contents)
        in_force_everywhere(world, world.in_force() or "")
        tried = world.status().tryout
        assert (tried.generation if tried else 0) == world.instance.generations.candidate_number


def seen(world: World, contents: dict[int, str | None]) -> None:
    generations = world.instance.generations
    bundles = [generations.current(), *([generations.candidate()] if generations.candidate_number else [])]
    for bundle in bundles:
        assert contents.setdefault(bundle.number, bundle.text) == bundle.text
    status = world.status()
    assert status.generation == generations.number
    if not status.busy:
        areas = world.instance.memory.areas
        using = {number for ordinal, number in enumerate(world.used()) if areas.serving(ordinal)}
        assert not status.successful or using <= {generations.number}


def step(world: World, rng: random.Random) -> None:
    """One event. Most are harmless, so that changes also come to their end."""
    ordinal = rng.randrange(ORDINALS)
    text = rng.choice(["first", "second", "third"])
    events: list[tuple[int, Callable[[], None]]] = [
        (6, lambda: world.turn(rng.choice([0.05, 0.5]))),
        (1, lambda: world.turn(rng.choice([WATCH_S, TRIAL_S, SPREAD_S]))),
        (8, lambda: world.starts(ordinal)),
        (2, lambda: world.crashes(ordinal)),
        (1, lambda: world.crash(1)),
        (2, lambda: world.reload(text)),
        (1, lambda: world.asks("try", text)),
        (1, lambda: world.asks("promote")),
        (1, lambda: world.asks("rollback")),
        (1, lambda: world.refuses(ordinal, world.instance.generations.number)),
        (1, lambda: world.refuses(ordinal, world.instance.generations.candidate_number)),
    ]
    if world.trial is not None:
        events += [(4, world.writes), (1, lambda: world.writes("error: no")), (3, world.ends), (1, lambda: world.ends(CRASHED))]
    weights, acts = zip(*events, strict=True)
    rng.choices(acts, weights)[0]()
