"""Drives a `Rollout` with events in random orders, beside processes and a trial child that are played, and asserts what must always hold.

    python -m tests.workers.process.rollout_orders 100000

- A slot that the parent's words name is never written.
- A number names one configuration for ever.
- After the last event and a quiet time, all processes use what is in force.
- A success is said only when all processes use it.
- Each ask gets exactly one answer.
"""

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from workers.process.asks import Ask
from workers.process.rollout import (
    RELOAD,
    SPREAD_S,
    TRIAL_S,
    WATCH_S,
    Action,
    Asked,
    CannotUse,
    Crashed,
    Event,
    Fork,
    Idle,
    KillTrial,
    Publish,
    Restore,
    Rollout,
    Say,
    Tick,
    Trial,
    TrialEnded,
    Try,
    Trying,
    Withdraw,
    Worse,
)

ORDINALS = 3
STEPS = 60
QUIET_TURNS = 300
TEXTS = ("first", "second", "third", "fourth", "fifth", "sixth")


class Written(NamedTuple):
    """What a slot holds."""

    number: int
    text: str


class Word(NamedTuple):
    """A word of the parent: the number of a configuration, and its slot."""

    number: int = 0
    slot: int = -1


class World:
    """A rollout, the slots, the parent's two words, and what the process in each ordinal uses. `files`: the text of the picker's files."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 100.0
        self.rollout = Rollout(1, TEXTS[0])
        self.said = Say()
        self.slots: dict[int, Written] = {0: Written(1, TEXTS[0])}
        self.texts = {1: TEXTS[0]}  # of each number that was ever published
        self.bad: set[int] = set()  # the numbers that were taken back
        self.highest = 1
        self.in_force, self.candidate = Word(1, 0), Word()
        self.used = [(1, 0)] * ORDINALS
        self.serving = [True] * ORDINALS
        self.files = TEXTS[0]
        self.trial: Trial | None = None  # of the child that was not reaped
        self.written = ""  # what the trial child has written
        self.killed = False
        self.again = False  # whether the next trial repeats one that was killed
        self.asked = 0
        self.reload_waits = False

    # What the parent does

    def tell(self, event: Event) -> None:
        self.told(self.rollout.on(event, self.now))

    def told(self, actions: Iterable[Action]) -> None:
        """Carries out actions, as the parent does."""
        for action in actions:
            self._act(action)
        if not self.said.busy and self.said.successful:
            using = {used for (used, _), serves in zip(self.used, self.serving, strict=True) if serves}
            assert using <= {self.in_force.number}, "the status is no longer true"

    def _act(self, action: Action) -> None:
        match action:
            case Fork(trial):
                assert self.trial is None, "two trials at a time"
                self._given(trial.number)
                self._write(trial.slot, None)
                self.trial, self.written, self.killed = trial, "", False
                self.reload_waits &= self.again or trial.ask != RELOAD
                self.again = False
            case KillTrial():
                assert self.trial is not None, "a signal to a child that was reaped"
                self.killed = True
                self.again = not isinstance(self.rollout.state, Trying)
            case Restore(source, slot, number):
                self._given(number)
                self.bad.add(self.in_force.number)
                assert self.slots[source].number in self.texts.keys() - self.bad, "it was never in force, or is bad"
                self._write(slot, Written(number, self.slots[source].text))
            case Publish(slot, number):
                assert self.candidate.number in (0, number), "a candidate beside a configuration that it was not tried for"
                self.in_force = self._named(slot, number) if number else Word()
            case Try(slot, number):
                self.candidate = self._named(slot, number)
            case Withdraw():
                assert self.candidate.number, "there is none"
                self.candidate = Word()
            case Say():
                assert action.answered <= self.asked, "an answer too much"
                assert action.finished - self.said.finished in (0, 1), "an end that nobody hears of"
                if action.finished > self.said.finished and action.successful:
                    assert not self.behind(), "a success that is none"
                self.said = action

    def _given(self, number: int) -> None:
        assert number == self.highest + 1, "a number is given out twice"
        self.highest = number

    def _write(self, slot: int, written: Written | None) -> None:
        assert slot not in (self.in_force.slot, self.candidate.slot), "it is published"
        if written is None:
            self.slots.pop(slot, None)
        else:
            self.slots[slot] = written

    def _named(self, slot: int, number: int) -> Word:
        written = self.slots[slot]
        assert written.number == number
        assert self.texts.setdefault(number, written.text) == written.text, "a number with two configurations"
        return Word(number, slot)

    # Events

    def turn(self, seconds: float = 0.1) -> None:
        self.now += seconds
        self.tell(Tick(self.behind()))

    def behind(self) -> tuple[int, ...]:
        """Returns the ordinals of processes that serve, but do not use what is published."""
        wanted = self.wanted()
        return tuple(ordinal for ordinal in range(ORDINALS) if self.serving[ordinal] and self.used[ordinal] != wanted[ordinal])

    def wanted(self) -> list[tuple[int, int]]:
        """Returns what the process in each ordinal has to use. The first one uses no candidate."""
        return [(self.in_force.number, self.candidate.number if ordinal else 0) for ordinal in range(ORDINALS)]

    def ask(self, what: str = "", text: str = "") -> None:
        if not what:
            self.files = text
            self.asked += not self.reload_waits
            self.reload_waits = True
        else:
            self.asked += 1
        self.tell(Asked(Ask(what, text) if what else RELOAD))  # type: ignore[arg-type]

    def changes(self, text: str) -> None:
        """A reload that goes well, so that there are configurations to go back to."""
        self.ask("", text)
        self.settle()

    def writes(self) -> None:
        """The trial child writes its result, perhaps after the parent has killed it."""
        assert self.trial is not None
        self.written = self.trial.ask.text if self.trial.ask != RELOAD else self.files
        self._write(self.trial.slot, Written(self.trial.number, self.written))

    def ends(self, *, good: bool = True) -> None:
        """The parent reaps the trial child."""
        self.trial = None
        self.tell(TrialEnded(self.written or None if good else None, ""))

    def adopts(self, ordinal: int) -> None:
        """A process starts, or takes over what is published."""
        for word in (self.in_force, self.candidate):
            assert not word.number or self.slots[word.slot].number == word.number, "it is gone"
        self.used[ordinal], self.serving[ordinal] = self.wanted()[ordinal], True

    def crashes(self, ordinal: int) -> None:
        self.serving[ordinal] = False
        self.tell(Crashed(f"child {ordinal}"))

    def step(self) -> None:
        """One event. Most are harmless, so that changes also come to their end."""
        rng = self.rng
        ordinal, text = rng.randrange(ORDINALS), rng.choice(TEXTS)
        numbers = [self.in_force.number, self.candidate.number, rng.randrange(1, self.in_force.number + 2)]
        events: list[tuple[int, Callable[[], None]]] = [
            (6, lambda: self.turn(rng.choice([0.05, 0.5]))),
            (1, lambda: self.turn(rng.choice([WATCH_S, TRIAL_S, SPREAD_S]))),
            (9, lambda: self.adopts(ordinal)),
            (2, lambda: self.crashes(ordinal)),
            (3, lambda: self.ask("", text)),
            (1, lambda: self.changes(text)),
            (1, lambda: self.ask("try", text)),
            (1, lambda: self.ask("promote")),
            (1, lambda: self.ask("rollback")),
            (2, lambda: self.tell(CannotUse(rng.choice(numbers), "no"))),
            (1, lambda: self.tell(Worse("slow"))),
        ]
        if self.trial is not None:
            events += [(4, self.writes), (3, self.ends), (1, lambda: self.ends(good=False))]
        weights, acts = zip(*events, strict=True)
        rng.choices(acts, weights)[0]()

    def settle(self) -> None:
        """Lets every process do what it has to, until nothing changes any more."""
        for _ in range(QUIET_TURNS):
            if self.trial is not None:
                if not self.killed:
                    self.writes()
                self.ends()
            for ordinal in range(ORDINALS):
                self.adopts(ordinal)
            self.turn()
            if isinstance(self.rollout.state, Idle) and self.rollout.next_deadline(self.now) > 0.0:
                return
        raise AssertionError("it never ends")


def order(seed: int) -> None:
    """Plays one order of events. Raises AssertionError if something does not hold."""
    rng = random.Random(seed)
    world = World(rng)
    for _ in range(rng.randrange(1, STEPS)):
        world.step()
    world.settle()
    assert world.used == world.wanted(), "processes with different configurations"
    assert world.said.answered == world.asked, "an ask without an answer"
    assert (world.said.busy, world.said.owed) == (False, False)
    assert world.rollout.number == world.in_force.number
    assert (world.rollout.candidate.number if world.rollout.candidate else 0) == world.candidate.number


def play(order: Callable[[int], object], steps: int, argv: Sequence[str]) -> int:
    """Plays as many orders as the only argument says, each of up to `steps` events. Prints the seed of one in which something does not
    hold.
    """
    for seed in range(int(argv[0])):
        try:
            order(seed)
        except AssertionError:
            print(f"order {seed}", file=sys.stderr)
            raise
    print(f"{argv[0]} orders of events, with up to {steps} events each: all hold")
    return 0


if __name__ == "__main__":
    sys.exit(play(order, STEPS, sys.argv[1:]))
