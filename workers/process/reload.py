"""Changes the configuration of a running picker, in the parent. `rollout` decides; this module carries out the actions of `rollout` and
reports events to it.

    asked ─▶ trial: a child reads, loads and proves it ─▶ publish: one word ─▶ children take over, and show its number in their areas

The parent runs no code of the configuration, which could hang or crash it. It forks the trial child, reads the child's result, and stores
the number. If a child dies meanwhile, its successor loads the configuration in force before it serves.
A candidate goes through the same steps, but its number goes into a second word: workers then use it beside the configuration in force
(`configurations`).

If the picker has several pools, each pool and the list of pools go through these steps on their own (`rollouts`).
"""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable

import structlog

from epp.request.pool_choice import listed, no_such_pool
from shm.documents import DocumentWriter
from workers.host.exit_codes import INTENDED, ending
from workers.process import asks, fork
from workers.process.asks import Ask
from workers.process.configurations import Configuration
from workers.process.generations import Attempt, Bundle, TrialResult
from workers.process.instance import FIRST, Instance
from workers.process.names import Names
from workers.process.pool_views import assigned, assigned_view, listed_now
from workers.process.reports import Report
from workers.process.rollout import (
    RELOAD,
    TRIAL_S,
    Asked,
    CannotUse,
    Event,
    Fork,
    KillTrial,
    Publish,
    Rollout,
    Say,
    TrialEnded,
    Try,
    Trying,
    Withdraw,
    Worse,
)
from workers.process.rollouts import UNCHANGED, Answered, Rollouts, Told
from workers.shared.reload_status import ReloadStatus

Trial = Callable[[Instance, Attempt], int]  # the main function of a trial child: writes its result into `Attempt.slot`

log = structlog.get_logger()


class Reloads:
    """Carries out the actions of the `Rollouts` of a picker. `trial`: runs in a child of its own."""

    def __init__(self, instance: Instance, trial: Trial, closed: Callable[[], list[int]]) -> None:
        """`closed`: returns the descriptors that a trial child closes."""
        self._instance = instance
        self._trial = trial
        self._closed = closed
        self._names = instance.layout.names
        self._status = DocumentWriter(instance.layout.status, instance.memory.reload)
        self._rollouts = Rollouts(instance.layout.listed)
        self._known: dict[int, Configuration] = {}  # by key: the configurations that have changed, and the list of pools
        self._highest: dict[int, int] = {}  # by key: the highest number of the earlier pools in the place
        self._left: dict[int, ReloadStatus] = {}  # by key: the last status of the earlier pools
        # By process id: the trial children that the parent has not reaped, each with the rollout that began it.
        self._tries: dict[int, tuple[Attempt, Rollout]] = {}
        self._not_started: list[tuple[int, str]] = []  # the keys of trials that could not be started, and why
        self._answered = 0  # the number of answered reloads of all pools
        self._assigned = assigned_view(instance)
        for view in instance.pools:
            Configuration(view, self._status).write()
        self._add(instance.layout.listed or 0)

    def ask(self, command: Ask = RELOAD) -> None:
        """Asks for a change of the configuration. The change begins at once, or after the present change."""
        key = self._key_of(command.pool) if command.pool else self._instance.layout.listed or 0
        if key is None:
            log.error("command is not obeyed", why=no_such_pool(command.pool, self._instance.pool_names))
            return
        self._add(key)
        self._tell(key, Asked(command), time.monotonic())

    def hang_up(self) -> None:
        """Acts on SIGHUP: takes the command that waits (`asks`). If none waits, asks for a reload of the files."""
        options = self._instance.options
        try:
            command = asks.take(options.run_dir, options.instance)
        except asks.AskRefused as refused:
            log.error("command is not obeyed", why=str(refused))
            return
        if command is None:
            log.info("the configuration is loaded again")
        else:
            about = {"source": command.source, "pool": command.pool}
            log.info("command", what=command.what, **{name: value for name, value in about.items() if value})
        self.ask(command or RELOAD)

    def next_deadline(self, now: float) -> float:
        """Returns the seconds until `look` must be called, even if no event comes before."""
        if self._rollouts.due or self._rollouts.answers:
            return 0.0
        return min(self._rollouts.next_deadline(now), *(each.next_deadline(now) for each in self._known.values()), math.inf)

    def look(self, now: float) -> None:
        """Does the due work of all configurations."""
        if (names := self._assigned.names()) is not None:
            self._use(assigned(self._instance, names), now)
        for key, configuration in list(self._known.items()):
            if why := configuration.look(now):
                self._tell(key, Worse(why), now)
        self._carry_out(self._rollouts.tick(now, lambda key: self._known[key].behind()), now)
        while self._not_started:
            key, text = self._not_started.pop()
            self._tell(key, TrialEnded(None, text), now)
        if self._rollouts.due and self._rollouts.round is not None:
            for key in self._rollouts.round.wanted:
                self._add(key)
            self._carry_out(self._rollouts.reload_changed(now), now)
        for answer in self._rollouts.answers:
            self._answer(answer)
        self._rollouts.answers.clear()

    def ends(self, pid: int) -> None:
        """Acts on the end of a child before the parent reaps it: kills processes that a plugin may have left in the trial's process
        group.
        """
        if pid in self._tries:
            self._kill_group(pid)

    def ended(self, pid: int, code: int, now: float) -> bool:
        """Acts on the end of a child, which the parent has reaped. Returns whether it was a trial child."""
        if pid not in self._tries:
            return False
        attempt, rollout = self._tries.pop(pid)
        known = self._known.get(attempt.key)
        if known is None or self._rollouts.members.get(attempt.key) is not rollout:
            return True  # the pool is gone, and another pool may have its place
        result = known.generations.result(attempt.slot)
        if result is None or result.pid != pid:
            why = f"it took more than {TRIAL_S:g} s" if rollout.late else f"its process ended before it was done: {ending(code)}"
            result = TrialResult(pid, f"error[trial]: the configuration was tried in a process of its own, and {why}")
        hashed, unchanged = result.bundle.hash if result.bundle is not None else None, False
        if attempt.key == self._rollouts.listed and result.bundle is not None and isinstance(rollout.state, Trying):
            pool_list = result.bundle.pool_list
            present = (
                pool_list if pool_list is not None else [place for place, view in enumerate(self._instance.pools) if view.options.pool_name]
            )
            self._rollouts.follow(result.changed, set(present) - set(result.changed))
            unchanged = hashed == self._hash_of_list()
        self._tell(attempt.key, TrialEnded(hashed, result.text, unchanged), now)
        return True

    def heard(self, report: Report, child: str, now: float) -> bool:
        """Acts on the report of a child. `child`: its name. Returns whether the report was about the configuration."""
        if report.changed:
            self.ask()
        elif report.generation and report.text:
            self._tell(report.key, CannotUse(report.generation, f"{child} cannot use it: {report.text}"), now)
        return report.changed or report.generation > 0

    def lost(self, child: str, code: int, now: float, *, hung: bool, pool: int | None = None) -> None:
        """If a child crashed or hung, blames the configuration that was put in force last, or the candidate.

        Ignores a SIGKILL that the parent did not send, because it says nothing about the configuration. `pool`: the pool that the child
        worked for; None if it is not known.
        """
        if code not in INTENDED and (hung or code != -signal.SIGKILL):
            self._carry_out(self._rollouts.crashed(child, now, pool), now)

    def stop(self) -> None:
        """Ends a running trial and ignores its result, because the picker ends."""
        for pid in self._tries:
            self._kill(pid)
        self._tries.clear()

    def _key_of(self, pool: str) -> int | None:
        return next((place for place, view in enumerate(self._instance.pools) if view.options.pool_name == pool), None)

    def _view(self, key: int) -> Instance:
        return self._instance.pools[key] if key < len(self._instance.pools) else self._instance

    def _add(self, key: int) -> None:
        """Makes it possible to change a configuration, unless this was done before."""
        if key not in self._known:
            configuration = self._known[key] = Configuration(self._view(key), self._status, self._left.get(key))
            if key == self._rollouts.listed:
                rollout = Rollout(FIRST, self._hash_of_list())
                configuration.generations.store(0, TrialResult(0, "", self._list()))
                configuration.generations.publish(0, FIRST)
            else:
                rollout = configuration.begin(self._highest.get(key, 0))
            self._rollouts.add(key, rollout)
            configuration.write()

    def _list(self) -> Bundle:
        """Returns the list of pools with which the picker started."""
        options = self._instance.options
        source = options.pools_file or options.config_dir
        return Bundle(FIRST, source, None, "", {}, Names(), time.time(), pool_list=dict(self._instance.pool_list) or None)

    def _hash_of_list(self) -> str:
        generations = self._instance.generations
        return generations.hash_of(generations.number) or self._list().hash

    def _drop(self, key: int) -> None:
        """Forgets the configuration of a pool that is gone."""
        self._kill_trials(key)
        rollout, known = self._rollouts.members.get(key), self._known.pop(key, None)
        if rollout is not None and known is not None:
            self._highest[key] = rollout.highest
            self._rollouts.drop(key)
            known.generations.withdraw()
            known.generations.publish(0, 0)
            self._left[key] = known.leave()
            known.write()

    def _use(self, instance: Instance, now: float) -> None:
        """Takes over which pools have which places."""
        before, self._instance = self._instance, instance
        for key, (old, new) in enumerate(zip(before.pools, instance.pools, strict=True)):
            if old.options.pool_name != new.options.pool_name or (new.bundle is None and old.bundle is not None):
                self._drop(key)
                if new.options.pool_name and (self._answered or not new.served):
                    self._add(key)  # the pool has no configuration yet, or its file may have changed since the start
                    self._tell(key, Asked(RELOAD), now)

    def _tell(self, key: int, event: Event, now: float) -> None:
        self._carry_out(self._rollouts.on(key, event, now), now)

    def _carry_out(self, told: list[Told], now: float) -> None:
        for key, action in told:
            if (known := self._known.get(key)) is None:
                continue  # the pool has just gone
            known.names = self._names
            match action:
                case Fork((number, slot, ask)):
                    self._fork(Attempt(slot, number, self._names, ask, key))
                case KillTrial():
                    self._kill_trials(key)
                case Say() if key == self._rollouts.listed:
                    self._say_of_list(action)
                case _:
                    if isinstance(action, Publish | Try) and action.number and key != self._rollouts.listed:
                        self._take_names(known.generations.bundle(action.slot).names)
                    known.act(action, now)
            if isinstance(action, Publish) and key == self._rollouts.listed:
                self._use(listed_now(self._instance), now)
        for key in {key for key, _ in told} & self._known.keys():
            self._known[key].write()
        if any(isinstance(action, Publish | Try | Withdraw) for _, action in told):
            self._instance.pipes.wake_workers()

    def _take_names(self, names: Names) -> None:
        """Keeps the names that have places. The names of a candidate may be older than the names of another pool's configuration."""
        if names.count > self._names.count:
            self._names = names

    def _say_of_list(self, said: Say) -> None:
        """Notes which changes of the list of pools have ended. A reload by command ends with the reloads of the pools (`_answer`)."""
        key = self._rollouts.listed
        assert key is not None
        last, going = self._known[key].last, self._rollouts.round is not None
        own = said.finished - said.answered  # changes that nobody asked for
        ended = own + self._answered > last.finished
        self._known[key].say(
            said._replace(
                finished=own + self._answered,
                answered=self._answered,
                owed=said.owed or going,
                busy=said.busy or going,
                successful=said.successful if ended else last.successful,
                text=said.text if ended else last.text,
            )
        )

    def _answer(self, answer: Answered) -> None:
        """Says how a reload of all pools has ended, with a line for each pool."""
        key = self._rollouts.listed
        assert key is not None
        lines, successful = [answer.said.text] if answer.said.text else [], answer.said.successful
        same = [self._view(place).options.pool_name for place, result in answer.results.items() if result.text == UNCHANGED]
        for place, result in sorted(answer.results.items()):
            name = self._view(place).options.pool_name or f"place {place}"
            if result.said is None:
                lines += [f"{name}: {result.text}"] if result.text != UNCHANGED else []
            elif result.said.successful:
                last = self._known[place].last
                findings = f"\n{result.said.text}" if result.said.text else ""
                lines.append(f"{name}: generation {last.generation} ({last.hash}) is in force{findings}")
            else:
                successful = False
                lines.append(f"{name}: refused: {result.said.text}")
        if same:
            lines.append(f"{UNCHANGED}: {listed(same)}")
        self._answered += 1
        last = self._known[key].last
        said = answer.said._replace(
            finished=last.finished + 1, answered=self._answered, owed=False, busy=False, successful=successful, text="\n".join(lines)
        )
        self._known[key].say(said, of_pools=True)
        self._known[key].write()

    def _fork(self, attempt: Attempt) -> None:
        generations = self._known[attempt.key].generations
        generations.clear(attempt.slot)
        try:
            pid = fork.spawn(
                f"{fork.TITLE}trial",
                lambda: self._try(attempt),
                closed=self._closed(),
                failed=lambda text: generations.store(attempt.slot, TrialResult(os.getpid(), f"error[trial]: {text}")),
            )
            self._tries[pid] = attempt, self._rollouts.members[attempt.key]
        except OSError as refused:  # no memory, or too many processes
            self._not_started.append((attempt.key, f"the trial cannot be started: {refused}"))

    def _try(self, attempt: Attempt) -> int:
        fork.end_with(self._instance.parent_pid)  # otherwise a trial that hangs would keep the lock of the instance
        os.setpgid(0, 0)  # so that the parent can also end the processes that a plugin starts
        return self._trial(self._view(attempt.key), attempt)

    def _kill_trials(self, key: int) -> None:
        for pid in [pid for pid, (attempt, _) in self._tries.items() if attempt.key == key]:
            self._kill(pid)

    def _kill(self, pid: int) -> None:
        """Kills a trial child and its process group."""
        self._kill_group(pid)
        os.kill(pid, signal.SIGKILL)  # the child may have no group of its own yet

    def _kill_group(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
