"""Decides how a running picker changes its configuration: what the picker tries, puts in force and takes back. Does nothing itself.

    Idle ─ asked ─▶ Trying: a child proves it ─▶ Spreading: all processes take over ─▶ Idle, and watched for WATCH_S
                      │ refused, or TRIAL_S are over     │ one cannot, or SPREAD_S are over
                      ▼                                  ▼
                    Idle                               Spreading: the configuration before

Like `restart.Policy`: `Reloads` reports events to `on` and carries out the actions that it returns, in their order. This module does no I/O
and reads no clock.

- A configuration has a number, which names it for ever, and a slot: the file that holds it (`generations`). Only this state machine gives
  out numbers and slots. When a trial begins, it reserves both, until the parent has reaped the trial child. The slots of the configuration
  in force, of the last good ones and of the candidate are never given out.
- A candidate goes through a trial in the same way, and is then used beside the configuration in force. A promotion puts the candidate in
  force, and a rollback withdraws the candidate. A configuration that comes into force withdraws any other candidate.
- If CRASHES children crash within WATCH_S after a change, or a child cannot use the configuration, the previous configuration comes back,
  under a new number. A trial that runs at this time is killed and made again, because a trial builds on the configuration in force.
- Each ask gets one answer, at the end of its trial or of its spread. All waiting reloads become one ask.
"""

import math
from collections import deque
from typing import Final, NamedTuple

from workers.process.asks import Ask

TRIAL_S: Final = 10.0
SPREAD_S: Final = 10.0  # long, because a busy machine loads slowly. Heartbeats show earlier which children hang
WATCH_S: Final = 10.0
CRASHES: Final = 2
ASKS_MAX: Final = 8
# Slots for the configuration in force, the KEPT - 1 before it, a candidate, one under trial, and one for a return during the trial
SLOTS: Final = 8
KEPT: Final = 5
RELOAD: Final = Ask("reload")


class Kept(NamedTuple):
    """A good configuration. Configurations with the same content have the same `hash`."""

    number: int
    slot: int
    hash: str


class Trial(NamedTuple):
    """The number and the slot that a trial child has reserved. `ask`: what the child tries."""

    number: int
    slot: int
    ask: Ask


# States


class Idle(NamedTuple):
    """Nothing changes."""


class Trying(NamedTuple):
    """A trial child runs. `late`: whether it was killed because it took more than TRIAL_S."""

    trial: Trial
    until: float
    late: bool = False


class Spreading(NamedTuple):
    """Processes take over what was published.

    `number`: the number of the configuration in force or of the candidate; 0 if the processes end their use of a configuration. `text`,
    `successful`: the status after all processes have done so. `answers`: whether this status is the answer to an ask.
    """

    number: int
    until: float
    text: str
    successful: bool
    answers: bool


State = Idle | Trying | Spreading


# Events


class Asked(NamedTuple):
    """Somebody asks for a change."""

    ask: Ask


class TrialEnded(NamedTuple):
    """The trial child was reaped, or could not be started.

    `hash`: None if the trial refused the configuration. `unchanged`: whether the configuration is in force already.
    """

    hash: str | None
    text: str
    unchanged: bool = False


class CannotUse(NamedTuple):
    """A child cannot use the configuration with this number."""

    number: int
    why: str


class Crashed(NamedTuple):
    """A child has crashed, or hung."""

    child: str


class Worse(NamedTuple):
    """The figures show that the candidate is worse than the configuration in force."""

    why: str


class Tick(NamedTuple):
    """Time has passed. `behind`: the ordinals of processes that do not use what was published.

    `waits`: whether another pool has the turn to begin a trial. Then this pool begins no trial.
    """

    behind: tuple[int, ...] = ()
    waits: bool = False


Event = Asked | TrialEnded | CannotUse | Crashed | Worse | Tick


# Actions


class Fork(NamedTuple):
    """Tells the parent to start the trial child, which writes its result into the slot."""

    trial: Trial


class KillTrial(NamedTuple):
    """Tells the parent to kill the trial child."""


class Restore(NamedTuple):
    """Tells the parent to copy slot `source` into `slot`, under a new number. `why`: why the present configuration is taken back."""

    source: int
    slot: int
    number: int
    why: str


class Publish(NamedTuple):
    """Tells the parent to put the configuration in this slot in force. With the number 0, no configuration is in force any more."""

    slot: int
    number: int


class Try(NamedTuple):
    """Tells the parent to use the configuration in this slot as the candidate."""

    slot: int
    number: int


class Withdraw(NamedTuple):
    """Tells the parent to end the use of the candidate. `why`: why the candidate is taken back; "" if it is promoted or replaced."""

    why: str


class Say(NamedTuple):
    """Tells the parent to publish the status.

    `finished`: how many changes have ended, with or without an ask. `successful`, `text`: how the last change ended. `answered`: how many
    asks have their answer. `owed`: whether an ask waits for its answer. `busy`: whether a change is under way.
    """

    finished: int = 0
    answered: int = 0
    owed: bool = False
    busy: bool = False
    successful: bool = True
    text: str = ""


Action = Fork | KillTrial | Restore | Publish | Try | Withdraw | Say


class Rollout:
    """Changes the configuration of one pool. `said`: the last published status. `highest`: the highest number given out so far."""

    def __init__(self, number: int, content: str | None) -> None:
        """`number`, `content`: those of the configuration in slot 0. If `content` is None, `number` is the highest number so far."""
        self.state: State = Idle()
        self.candidate: Kept | None = None
        self._kept = [Kept(number, 0, content)] if content is not None else []  # the last entry is in force
        self._began_empty = content is None
        self.highest = number
        self._trial: Trial | None = None  # the trial of the child that the parent has not reaped
        self._asks: deque[Ask] = deque()
        self._reload = False  # whether a reload waits
        self._again: Trial | None = None  # the trial that was killed and is made again
        self._watched_until = -math.inf  # crashes until then count against the configuration in force
        self._crashes: list[float] = []  # their times
        self._stays = 0  # the number of a configuration that cannot be taken back, or 0
        self.said = Say()
        self._actions: list[Action] = []

    @property
    def number(self) -> int:
        """The number of the configuration in force, or 0 before the first configuration."""
        return self._kept[-1].number if self._kept else 0

    @property
    def tries(self) -> bool:
        """Whether the parent has a trial child to reap."""
        return self._trial is not None

    @property
    def wants_turn(self) -> bool:
        """Whether the next step is a trial."""
        first = self._asks[0] if self._asks else None
        return self._again is not None or self._reload or (first is not None and first.what == "try")

    @property
    def late(self) -> bool:
        """Whether the trial child was killed because it took too long."""
        return isinstance(self.state, Trying) and self.state.late

    def next_deadline(self, now: float, *, waits: bool = False) -> float:
        """Returns the seconds until `on` needs a `Tick`, if no event comes before. `waits`: as in `Tick`."""
        if isinstance(self.state, Idle):
            begins = self._trial is None and (not waits if self.wants_turn else bool(self._asks))
            return 0.0 if begins else math.inf
        return max(0.0, self.state.until - now)

    def on(self, event: Event, now: float) -> list[Action]:
        """Returns the actions after an event."""
        before = self.said
        match event:
            case Asked(ask):
                self._ask(ask)
            case TrialEnded():
                self._trial_ended(event, now)
            case CannotUse(number, why):
                if number == self.number != self._stays:
                    self._go_back(why, now)
                elif self.candidate is not None and number == self.candidate.number:
                    self._take_back(why, now)
            case Crashed(child):
                self._crashed(child, now)
            case Worse(why):
                if self.candidate is not None:
                    self._take_back(f"it is worse: {why}", now)
            case _:
                self._tick(event, now)
        self._say(before)
        actions, self._actions = self._actions, []
        return actions

    def _ask(self, ask: Ask) -> None:
        if ask.what == "reload":
            self._reload = True
        elif len(self._asks) < ASKS_MAX:
            self._asks.append(ask)
        else:
            self._finish(False, f"error[busy]: {ASKS_MAX} commands wait already: try again later", answers=True)

    def _tick(self, tick: Tick, now: float) -> None:
        state = self.state
        if isinstance(state, Trying) and now >= state.until:
            self.state = Trying(state.trial, math.inf, late=True)
            self._actions.append(KillTrial())
        elif isinstance(state, Spreading):
            self._spread(state, tick.behind, now)
        elif isinstance(state, Idle) and self._trial is None and not (tick.waits and self.wants_turn):
            self._begin(now)

    def _spread(self, state: Spreading, behind: tuple[int, ...], now: float) -> None:
        if not behind:
            self._end(state.successful, state.text, answers=state.answers)
        elif now >= state.until:
            why = f"processes in ordinals {list(behind)} do not use it after {SPREAD_S:g} s"
            if state.number == self.number:
                self._go_back(why, now)
            elif self.candidate is not None:
                self._take_back(why, now)
            else:
                self._end(False, f"{state.text}; {why}", answers=state.answers)

    def _begin(self, now: float) -> None:
        """Begins the next ask: first a trial that is made again, then a reload, then commands."""
        if self._again is not None:
            (_, _, ask), self._again = self._again, None
        elif self._reload:
            ask, self._reload = RELOAD, False
        elif self._asks:
            ask = self._asks.popleft()
        else:
            return
        if ask.what != "reload" and not self._kept:
            self._end(False, "error[no-generation]: no configuration is in force: reload first", answers=True)
        elif ask.what in ("reload", "try"):
            number, slot = self._take()
            self._trial = Trial(number, slot, ask)
            self.state = Trying(self._trial, now + TRIAL_S)
            self._actions.append(Fork(self._trial))
        elif ask.what == "promote" and self.candidate is not None:
            self._publish(self.candidate, "", now, answers=True)
        elif ask.what == "promote":
            text = "error[no-candidate]: no configuration is tried: `epp config try FILE` begins to try one"
            self._end(False, text, answers=True)
        elif self.candidate is not None:
            self._take_back("epp config rollback", now, asked=True)
        else:
            self._go_back("epp config rollback", now, asked=True)

    def _trial_ended(self, event: TrialEnded, now: float) -> None:
        trial, self._trial = self._trial, None
        assert trial is not None, "a trial ends once"
        if not isinstance(self.state, Trying):
            return  # the trial is made again
        if event.hash is None:
            self.state = Idle()
            self._finish(False, event.text, answers=True)
        elif event.unchanged:
            self.state = Spreading(self.number, now + SPREAD_S, event.text, successful=True, answers=True)
        elif trial.ask.what == "reload":
            self._publish(Kept(trial.number, trial.slot, event.hash), event.text, now, answers=True)
        else:
            if self.candidate is not None:
                self._withdraw()
            self.candidate = Kept(trial.number, trial.slot, event.hash)
            self._crashes = []
            self._actions.append(Try(trial.slot, trial.number))
            self.state = Spreading(trial.number, now + SPREAD_S, event.text, successful=True, answers=True)

    def _crashed(self, child: str, now: float) -> None:
        watched = now < self._watched_until
        if not watched and self.candidate is None:
            return
        self._crashes = [*(at for at in self._crashes if now - at < WATCH_S), now]
        if len(self._crashes) < CRASHES:
            return
        if watched:
            self._go_back(f"{len(self._crashes)} processes ended with it, the last one was {child}", now)
        else:
            self._take_back(f"{CRASHES} processes ended while it was tried, the last one was {child}", now)

    def _publish(self, kept: Kept, text: str, now: float, *, answers: bool, successful: bool = True) -> None:
        """Puts a configuration in force. Forgets kept configurations with the same content, because returning to them would change
        nothing.
        """
        self._kept = [*(each for each in self._kept if each.hash != kept.hash), kept][-KEPT:]
        candidate, publish = self.candidate, Publish(kept.slot, kept.number)
        if candidate is None:
            self._actions.append(publish)
        elif candidate.number == kept.number:  # the candidate is put in force before its withdrawal, so that workers keep its pipeline
            self._actions.append(publish)
            self._withdraw()
        else:
            why = "the configuration in force changes"
            text = "\n".join(filter(None, (text, f"candidate {candidate.number} is taken back: {why}")))
            self._withdraw(why)
            self._actions.append(publish)
        self._watched_until, self._crashes = now + WATCH_S, []
        self.state = Spreading(kept.number, now + SPREAD_S, text, successful, answers)

    def _go_back(self, why: str, now: float, *, asked: bool = False) -> None:
        """Puts the previous configuration in force. `asked`: whether an operator asked for the return; otherwise the present configuration
        failed.
        """
        number, state = self.number, self.state
        answers = asked or (isinstance(state, Spreading) and state.answers)
        before = self._kept[-2] if len(self._kept) > 1 else None
        if before is None and (asked or not self._began_empty):
            self._stays = self._stays if asked else number
            self._end(False, f"error[no-generation]: generation {number} stays: there is no good one before it ({why})", answers=answers)
            return
        if isinstance(state, Trying):
            self._again = state.trial
            self._actions.append(KillTrial())
        text = f"{'' if asked else 'error[rolled-back]: '}generation {number} is taken back: {why}"
        if before is None:
            self._leave(f"{text}; there is none before it, so the pool is not served", answers=answers)
        else:
            again, slot = self._take()
            self._kept.pop()
            self._actions.append(Restore(before.slot, slot, again, why))
            self._publish(Kept(again, slot, before.hash), text, now, answers=answers, successful=asked)
        self._watched_until = -math.inf  # crashes do not count against a configuration that was good before

    def _leave(self, text: str, *, answers: bool) -> None:
        """Ends the use of the configuration in force, which has no predecessor."""
        self._kept.clear()
        if self.candidate is not None:
            self._withdraw("the configuration in force is taken back")
        self._actions.append(Publish(0, 0))
        self.state = Idle()
        self._finish(False, text, answers=answers)

    def _take_back(self, why: str, now: float, *, asked: bool = False) -> None:
        """Withdraws the candidate. `asked`: whether an operator asked for this; otherwise the candidate failed, and the status says so."""
        assert self.candidate is not None
        text, state = f"candidate {self.candidate.number} is taken back: {why}", self.state
        self._withdraw(why)
        if asked:
            self.state = Spreading(0, now + SPREAD_S, text, successful=True, answers=True)
        else:
            answers = isinstance(state, Spreading) and state.answers
            self._end(False, f"error[rolled-back]: {text}", answers=answers)

    def _withdraw(self, why: str = "") -> None:
        self.candidate = None
        self._actions.append(Withdraw(why))

    def _take(self) -> tuple[int, int]:
        """Returns (number, slot) for another configuration: a new number, and the next slot in turn that is not reserved."""
        self.highest += 1
        reserved = {each.slot for each in (*self._kept, self.candidate, self._trial) if each is not None}
        last = self._kept[-1].slot if self._kept else -1
        return self.highest, next(s for n in range(SLOTS) if (s := (last + 1 + n) % SLOTS) not in reserved)

    def _end(self, successful: bool, text: str, *, answers: bool) -> None:
        """Ends a spread, but not a running trial."""
        if isinstance(self.state, Spreading):
            self.state = Idle()
        self._finish(successful, text, answers=answers)

    def _finish(self, successful: bool, text: str, *, answers: bool) -> None:
        self.said = self.said._replace(
            finished=self.said.finished + 1, answered=self.said.answered + answers, successful=successful, text=text
        )

    def _say(self, before: Say) -> None:
        state = self.state
        owed = isinstance(state, Trying) or (isinstance(state, Spreading) and state.answers) or self._again is not None
        self.said = self.said._replace(owed=owed, busy=owed or not isinstance(state, Idle))
        if self.said != before:
            self._actions.append(self.said)
