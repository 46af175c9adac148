"""Carries out what a `Rollout` decides about the configuration of one pool, or about the list of pools, and publishes its status.

Also follows the candidate beside the configuration in force, and says when the candidate is worse:

    begin ─▶ all workers use it ─▶ counted, watched ─▶ promoted, rolled back by hand, or taken back because it is worse

The workers count (`workers.worker.telemetry.tryout_figures`). The parent reads the sums of all workers, and gives them to the
sequential test (`epp.decision.tryout`), which says when the candidate is worse.
"""

import math
import os
import time
from typing import Final

import msgspec
import structlog

from epp.decision.tryout import CANDIDATE as TRIED
from epp.decision.tryout import IN_FORCE, Side, Watch
from epp.metrics.request_series import TRYOUT, TRYOUT_SHADOWS
from shm.documents import DocumentWriter
from shm.series_reader import SeriesReader, Values
from workers.process.generations import Bundle, Generations, TrialResult
from workers.process.instance import FIRST, Instance
from workers.process.layout import CANDIDATE, GENERATION, gauge_of_pool
from workers.process.restart import SUPERVISOR
from workers.process.rollout import ASKS_MAX, Action, Publish, Restore, Rollout, Say, Try, Withdraw
from workers.shared import reload_status
from workers.shared.reload_status import POOL_TEXT_MAX, TEXT_MAX, ReloadStatus, TryoutStatus

log = structlog.get_logger()

LOOK_S: Final = 0.5
OUTCOMES: Final = ("agreed", "differed", "failed")
NEVER: Final = ReloadStatus(0, "", "", 0.0)  # nothing has changed


class Configuration:
    """The configuration of one pool, or the list of pools: carries out what its `Rollout` decides, except for trials. Writes its status.

    `names`: the names that have places in shared memory because a configuration of this pool uses them.
    """

    def __init__(self, instance: Instance, status: DocumentWriter, before: ReloadStatus | None = None) -> None:
        """`instance`: the instance as the pool sees it. `status`: writes all statuses. `before`: the last status of the earlier pool in
        this place.
        """
        self.instance = instance
        self.generations: Generations = instance.generations
        self.names = instance.layout.names
        self._before = before or NEVER
        self.last = msgspec.structs.replace(NEVER, finished=self._before.finished, answered=self._before.answered)
        self._status = status
        self._tryout = CandidateWatch(instance)  # the list of pools has no candidate

    def next_deadline(self, now: float) -> float:
        """Returns the seconds until `look` has something to do."""
        return self._tryout.next_deadline(now)

    def look(self, now: float) -> str:
        """Returns why the candidate is worse, or "" if no figure shows this. Publishes the candidate's figures."""
        why = self._tryout.look(now)
        if why == "":
            self.write()
        return why or ""

    def act(self, action: Action, now: float) -> None:
        """Carries out an action."""
        generations = self.generations
        match action:
            case Restore(source, slot, number, why):
                log.warning("configuration is taken back", generation=generations.number, why=why, **self.instance.named)
                # With the present names, because later configurations keep their places in shared memory.
                before = {"number": number, "names": self.names, "at": time.time(), "followed": False}
                restored = msgspec.structs.replace(generations.bundle(source), **before)
                generations.store(slot, TrialResult(os.getpid(), "", restored))
            case Publish(slot, number):
                generations.publish(slot, number)
            case Try(slot, number):
                self._tryout.begin(generations.bundle(slot), now)
                generations.try_out(slot, number)
            case Withdraw(why):
                if why:
                    log.warning("candidate is taken back", generation=generations.candidate_number, why=why, **self.instance.named)
                generations.withdraw()
                self._tryout.end()
            case Say():
                self.say(action)

    def say(self, said: Say, *, of_pools: bool = False) -> None:
        """Notes, for the status, which change has ended and which change runs. `of_pools`: whether the text has a line for each pool."""
        finished = self._before.finished + said.finished
        ended = finished > self.last.finished
        if ended:
            findings = {"findings": said.text} if said.text else {}
            write = log.info if said.successful else log.error
            write("reload", successful=said.successful, generation=self.generations.number, **self.instance.named, **findings)
        self.last = msgspec.structs.replace(
            self.last,
            finished=finished,
            answered=self._before.answered + said.answered,
            owed=said.owed,
            busy=said.busy,
            successful=said.successful,
            text=said.text[: TEXT_MAX if self.instance.pool is None else POOL_TEXT_MAX],
            at=time.time() if ended else self.last.at,
            text_of_pools=of_pools if ended else self.last.text_of_pools,
        )

    def behind(self) -> tuple[int, ...]:
        """Returns the ordinals of processes that serve, but do not use what was published."""
        areas, generations, pool = self.instance.memory.areas, self.generations, self.instance.pool
        wanted = [(generations.number, generations.candidate_number)] * self.instance.layout.ordinals
        wanted[SUPERVISOR] = generations.number, 0  # the supervisor uses no candidate
        used = zip(areas.scalars(gauge_of_pool(GENERATION, pool)), areas.scalars(gauge_of_pool(CANDIDATE, pool)), strict=True)
        return tuple(ordinal for ordinal, pair in enumerate(used) if areas.serving(ordinal) and pair != wanted[ordinal])

    def leave(self) -> ReloadStatus:
        """Answers all commands that wait for a change of this gone pool. Returns the status with which the next pool in its place
        begins.
        """
        text = f"error[no-pool]: the pool '{self.instance.options.pool_name}' is gone"
        ended = {"finished": self.last.finished + 1, "answered": self.last.answered + ASKS_MAX + 2}
        self.last = msgspec.structs.replace(self.last, **ended, owed=False, busy=False, successful=False, text=text, at=time.time())
        return self.last

    def write(self) -> None:
        """Publishes the status."""
        number, hashed, source, since = self._in_force()
        in_force = {"generation": number, "hash": hashed, "source": source, "since": since}
        self.last = msgspec.structs.replace(self.last, **in_force, tryout=self._tryout.status())
        key = self.generations.key
        self._status.write(key, reload_status.fitting(self.last, self._status.schema.capacities[key]))

    def _in_force(self) -> tuple[int, str, str, float]:
        """Returns number, hash and source of the configuration in force, and the time at which it came into force."""
        bundle = self.generations.current() if self.generations.number else self.instance.bundle
        return (0, "", "", 0.0) if bundle is None else (bundle.number, bundle.hash, bundle.source, bundle.at)

    def begin(self, highest: int) -> Rollout:
        """Returns the rollout of the configuration, and stores the pool's first configuration for the rollout if the pool has one.

        `highest`: the highest number of all configurations that this place has had, or 0.
        """
        generations, bundle = self.generations, self.instance.bundle
        if generations.number:
            return Rollout(generations.number, generations.hash_of(generations.number))
        if bundle is None:
            return Rollout(max(highest, FIRST), None)
        number = highest + 1
        generations.store(0, TrialResult(0, "", msgspec.structs.replace(bundle, number=number)))
        generations.publish(0, number)
        return Rollout(number, bundle.hash)


class CandidateWatch:
    """Follows at most one candidate at a time. `bundle`: the candidate; None while there is no candidate."""

    def __init__(self, instance: Instance) -> None:
        """`instance`: the instance as the pool of the candidate sees it."""
        self._pool = () if not instance.layout.pools else (instance.options.pool_name,)
        self._sides: SeriesReader = instance.memory.series_reader(TRYOUT)
        self._shadows: SeriesReader = instance.memory.series_reader(TRYOUT_SHADOWS)
        self.bundle: Bundle | None = None
        self._watch = Watch()
        self._before: tuple[Side, Side] = (Side(), Side())
        self._compared_before: tuple[int, ...] = ()
        self._next = 0.0

    def begin(self, bundle: Bundle, now: float) -> None:
        """Begins to count the figures of this candidate."""
        self.bundle = bundle
        self._watch = Watch()
        self._before, self._compared_before = self._counted(), self._compared()
        self._next = now + LOOK_S

    def end(self) -> None:
        """Ends the counting: there is no candidate any more."""
        self.bundle = None

    def next_deadline(self, now: float) -> float:
        """Returns the seconds until `look` has something to do, or infinity without a candidate."""
        return max(0.0, self._next - now) if self.bundle is not None else math.inf

    def look(self, now: float) -> str | None:
        """Returns why the candidate is worse, or "" if no figure shows this. Returns None if the next check is not due yet."""
        if self.bundle is None or now < self._next:
            return None
        self._next = now + LOOK_S
        in_force, candidate = self._since()
        return self._watch.look(in_force, candidate)

    def status(self) -> TryoutStatus | None:
        """Returns the candidate and its figures since its tryout began. Returns None without a candidate."""
        bundle = self.bundle
        if bundle is None:
            return None
        in_force, candidate = self._since()
        agreed, differed, failed = (now - then for now, then in zip(self._compared(), self._compared_before, strict=True))
        return TryoutStatus(
            bundle.number, bundle.hash, bundle.source, bundle.share, bundle.at, in_force, candidate, agreed, differed, failed
        )

    def _since(self) -> tuple[Side, Side]:
        in_force, candidate = self._counted()
        return in_force.since(self._before[0]), candidate.since(self._before[1])

    def _counted(self) -> tuple[Side, Side]:
        rows = self._sides.rows()
        return side(rows.get((IN_FORCE, *self._pool))), side(rows.get((TRIED, *self._pool)))

    def _compared(self) -> tuple[int, ...]:
        rows = self._shadows.rows()
        found = (rows.get((outcome, *self._pool)) for outcome in OUTCOMES)
        return tuple(values.counters[0] if values is not None else 0 for values in found)


def side(values: Values | None) -> Side:
    """Returns the sums of one configuration over all workers."""
    if values is None:
        return Side()
    requests, errors, prompt, cached = values.counters
    (first_token, _), (decisions, seconds) = values.histograms
    return Side(requests, errors, prompt, cached, sum(decisions), seconds, tuple(first_token))
