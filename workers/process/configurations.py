"""Carries out what a `Rollout` decides about the configuration of one pool, or about the list of pools, and publishes its status."""

import math
import os
import time
from typing import Final

import msgspec
import structlog

from shm.documents import DocumentWriter
from workers.process.generations import Generations, Result
from workers.process.instance import FIRST, Instance
from workers.process.layout import CANDIDATE, GENERATION, of_key
from workers.process.restart import SUPERVISOR
from workers.process.rollout import ASKS_MAX, Action, Publish, Restore, Rollout, Say, Try, Withdraw
from workers.process.tryout import Tryout
from workers.shared import reload_status
from workers.shared.reload_status import POOL_TEXT_MAX, TEXT_MAX, ReloadStatus

log = structlog.get_logger()

NEVER: Final = ReloadStatus(0, "", "", 0.0)  # nothing has changed


class Configuration:
    """The configuration of one pool, or the list of pools: carries out what its `Rollout` decides, except for trials. Writes its status.

    `names`: those that have places in shared memory by its configurations.
    """

    def __init__(self, instance: Instance, status: DocumentWriter, before: ReloadStatus | None = None) -> None:
        """`instance`: as the pool sees it. `status`: the writer of all statuses. `before`: that of a pool that has left this place."""
        self.instance = instance
        self.generations: Generations = instance.generations
        self.names = instance.layout.names
        self._before = before or NEVER
        self.last = msgspec.structs.replace(NEVER, finished=self._before.finished, answered=self._before.answered)
        self._status = status
        self._tryout = Tryout(instance) if instance.pool is not None or not instance.pools else None

    @property
    def _named(self) -> dict[str, str]:
        return {} if self.instance.pool is None else {"pool": self.instance.options.pool_name}

    def next_deadline(self, now: float) -> float:
        """Returns the seconds until `look` has something to do."""
        return self._tryout.next_deadline(now) if self._tryout is not None else math.inf

    def look(self, now: float) -> str:
        """Returns why the candidate is worse; "" if nothing shows that. Publishes what was counted of it."""
        why = self._tryout.look(now) if self._tryout is not None else None
        if why == "":
            self.write()
        return why or ""

    def act(self, action: Action, now: float) -> None:
        """Carries out an action."""
        generations = self.generations
        match action:
            case Restore(source, slot, number, why):
                log.warning("configuration is taken back", generation=generations.number, why=why, **self._named)
                # Under the present names, because places in shared memory that later configurations have taken stay taken.
                before = {"number": number, "names": self.names, "at": time.time(), "followed": False}
                restored = msgspec.structs.replace(generations.bundle(source), **before)
                generations.store(slot, Result(os.getpid(), "", restored))
            case Publish(slot, number):
                generations.publish(slot, number)
            case Try(slot, number):
                assert self._tryout is not None, "the list of pools has no candidate"
                self._tryout.begin(generations.bundle(slot), now)
                generations.try_out(slot, number)
            case Withdraw(why):
                if why:
                    log.warning("candidate is taken back", generation=generations.candidate_number, why=why, **self._named)
                generations.withdraw()
                if self._tryout is not None:
                    self._tryout.end()
            case Say():
                self.say(action)

    def say(self, said: Say, *, of_pools: bool = False) -> None:
        """Notes what has ended and what is under way, for the status. `of_pools`: whether the text has a line for each pool."""
        finished = self._before.finished + said.finished
        ended = finished > self.last.finished
        if ended:
            findings = {"findings": said.text} if said.text else {}
            write = log.info if said.successful else log.error
            write("reload", successful=said.successful, generation=self.generations.number, **self._named, **findings)
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

    def leave(self) -> ReloadStatus:
        """Answers all that wait for a change of this pool, which is gone. Returns the status from which another one there goes on."""
        text = f"error[no-pool]: the pool '{self.instance.options.pool_name}' is gone"
        ended = {"finished": self.last.finished + 1, "answered": self.last.answered + ASKS_MAX + 2}
        self.last = msgspec.structs.replace(self.last, **ended, owed=False, busy=False, successful=False, text=text, at=time.time())
        return self.last

    def write(self) -> None:
        """Publishes the status."""
        number, hashed, source, since = self._in_force()
        tryout = self._tryout.status() if self._tryout is not None else None
        self.last = msgspec.structs.replace(self.last, generation=number, hash=hashed, source=source, since=since, tryout=tryout)
        self._status.write(self.generations.key, reload_status.encode(self.last))

    def _in_force(self) -> tuple[int, str, str, float]:
        """Returns number, hash and source of the configuration in force, and since when it is."""
        bundle = self.generations.current() if self.generations.number else self.instance.bundle
        return (0, "", "", 0.0) if bundle is None else (bundle.number, bundle.hash, bundle.source, bundle.at)

    def begin(self, highest: int) -> Rollout:
        """Returns the rollout of the configuration, and stores the first configuration for it if there is one.

        `highest`: the highest number that a configuration ever had here; 0: nothing has changed yet.
        """
        generations, bundle = self.generations, self.instance.bundle
        if generations.number:
            return Rollout(generations.number, generations.hash_of(generations.number))
        if bundle is None:
            return Rollout(max(highest, FIRST), None)
        number = highest + 1
        generations.store(0, Result(0, "", msgspec.structs.replace(bundle, number=number)))
        generations.publish(0, number)
        return Rollout(number, bundle.hash)


def lagging(instance: Instance) -> list[int]:
    """Returns the ordinals of processes that serve, but do not use what `Generations` names. `instance`: as the pool sees it."""
    areas, generations, pool = instance.memory.areas, instance.generations, instance.pool
    wanted = [(generations.number, generations.candidate_number)] * instance.layout.ordinals
    wanted[SUPERVISOR] = generations.number, 0  # it uses no candidate
    used = zip(areas.scalars(of_key(GENERATION, pool)), areas.scalars(of_key(CANDIDATE, pool)), strict=True)
    return [ordinal for ordinal, pair in enumerate(used) if areas.serving(ordinal) and pair != wanted[ordinal]]
