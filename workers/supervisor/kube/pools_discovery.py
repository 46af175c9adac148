"""Finds the endpoints of several pools in Kubernetes, with one watch of the pods and one of the InferencePools of each namespace.

    InferencePools of a namespace ─ choose ─▶ the InferencePool of each pool number ─┬─▶ endpoints of each pool ─▶ `apply`
    pods of the namespace ───────────────────────────────────────────────────────────┘

- Every pod of the namespace is read, so a new selector or a new pool needs no further list.
- `apply` is first called for a pool when pods and InferencePools have been listed: until then the endpoints of a predecessor stay.
- A pool whose InferencePool does not exist has no endpoints. This changes nothing for the other pools.

`discovery` has the same for the only pool of a picker.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from epp.endpoints.label_selectors import Selector
from workers.host.options import POOL_GROUP
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.supervisor.kube.api import Api, Resource
from workers.supervisor.kube.batches import Batches
from workers.supervisor.kube.known import Change
from workers.supervisor.kube.pods import Pod, decode_pod, specs_of
from workers.supervisor.kube.pool import PLURAL, VERSION, InferencePool, decode_pool
from workers.supervisor.kube.reflect import Outage, Reflector

Choose = Callable[[Mapping[str, InferencePool]], Mapping[int, InferencePool]]
Specs = dict[str, tuple[EndpointSpec, ...]]  # by the name of the pod; without pods that have no endpoint
NOTHING: Final[Mapping[str, InferencePool]] = {}


class Selecting:
    """Finds the pools that may select a pod, without a look at every pool: by one label of each selector."""

    def __init__(self, pools: Iterable[tuple[int, Selector]]) -> None:
        self._by_label: dict[tuple[str, str], list[int]] = {}
        self._others: list[int] = []
        for number, selector in pools:
            term = next((term for term in selector.terms if term.operator == "In"), None)
            if term is None:
                self._others.append(number)
                continue
            for value in term.values:
                self._by_label.setdefault((term.key, value), []).append(number)

    def of(self, pod: Pod) -> list[int]:
        """Returns the numbers of all pools that select the pod, and perhaps of some that do not."""
        return [*self._others, *(number for label in pod.labels for number in self._by_label.get(label, ()))]


class PoolsDiscovery:
    """Follows the pods and the InferencePools of one namespace for all pools there."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        choose: Choose,
        *,
        asks: bool,
        apply: Callable[[Collection[EndpointSpec], int], None],
        listed: Callable[[], None],
        report: Callable[..., None],
        outage: Outage,
        successor: bool,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """`choose` takes the InferencePools by name, and returns that of each pool number; pools that flags describe are among them.

        `asks`: whether InferencePools are followed. `apply` gets all endpoints of one pool and its number. `listed` is called when
        everything has been listed for the first time. `successor`: whether a predecessor knew endpoints. `cpu` measures the work for each
        watch (`pace`).
        """
        self.namespace = namespace
        self._choose = choose
        self._apply = apply
        self._listed = listed
        self._pods: Reflector[Pod] = Reflector(
            api,
            Resource("", "v1", "pods", namespace),
            decode=decode_pod,
            changed=self._pods_changed,
            report=report,
            outage=outage,
            cpu=cpu,
            expects=successor,
        )
        self._objects: Reflector[InferencePool] | None = None
        if asks:
            self._objects = Reflector(
                api,
                Resource(POOL_GROUP, VERSION, PLURAL, namespace),
                decode=decode_pool,
                changed=lambda _: self._pools_changed(),
                report=report,
                outage=outage,
                cpu=cpu,
                expects=successor,
            )
        self.pools: Mapping[int, InferencePool] = {}
        self._selecting = Selecting(())
        self._specs: dict[int, Specs] = {}
        self._in: dict[str, list[int]] = {}  # name of a pod -> the pools that have endpoints of it
        self._changed: set[int] = set()
        self._all_listed = False
        self._batches = Batches(self._apply_changed)

    async def run(self) -> None:
        """Follows pods and InferencePools until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pods.run())
                if self._objects is not None:
                    group.create_task(self._objects.run())
                else:
                    self._pools_changed()
        finally:
            self._batches.cancel()

    def missing(self) -> str:
        """Returns what the API server has not said yet; "" for nothing. A pool that does not exist is nothing that is missing."""
        for reflector in (self._objects, self._pods):
            if reflector is not None and not reflector.synced:
                return f"{reflector.resource} in namespace {self.namespace} are not known: {reflector.problem or 'no answer yet'}"
        return ""

    def unread(self, name: str) -> str:
        """Returns why there is no InferencePool of this name."""
        if self._objects is None or self._objects.absent:
            return "its definition (CRD) is not installed"
        unread = self._objects.unread(name)
        return f"it cannot be read: {unread}" if unread else "there is none"

    def apply_all(self) -> None:
        """Applies the endpoints of all pools with the next ones, because the table may have lost some."""
        self._changed |= self.pools.keys()

    def _pools_changed(self) -> None:
        if self._objects is not None and not self._objects.synced:
            return
        known = {name: pool for name, pool in self._objects.known.items() if not pool.deleted} if self._objects is not None else NOTHING
        before, self.pools = self.pools, self._choose(known)
        self._selecting = Selecting((number, pool.selector) for number, pool in self.pools.items())
        moved = {n for n in {*before, *self.pools} if _derived_from(before.get(n)) != _derived_from(self.pools.get(n))}
        for number in moved:
            for name in self._specs.pop(number, ()):
                self._in[name].remove(number)
        added = moved & self.pools.keys()
        if added:
            of_added = Selecting((number, self.pools[number].selector) for number in added)
            for pod in self._pods.known.values():
                self._derive(pod, of_added.of(pod))
        self._changed |= moved
        self._batches.now()

    def _pods_changed(self, change: Change[Pod]) -> None:
        for name in change.deleted:
            self._forget(name)
        for name, pod in change.upserted.items():
            self._forget(name)
            self._derive(pod, self._selecting.of(pod))
        if change.listed:
            self._batches.now()
        elif self._changed:
            self._batches.soon()

    def _forget(self, name: str) -> None:
        """Removes the endpoints of a pod from all pools."""
        for number in self._in.pop(name, ()):
            self._specs[number].pop(name, None)
            self._changed.add(number)

    def _derive(self, pod: Pod, numbers: Iterable[int]) -> None:
        """Adds the endpoints of a pod to these pools, as far as they select it."""
        for number in numbers:
            pool = self.pools[number]
            if specs := specs_of(pod, pool.selector, pool.ports, number):
                self._specs.setdefault(number, {})[pod.name] = specs
                self._in.setdefault(pod.name, []).append(number)
                self._changed.add(number)

    def _apply_changed(self) -> None:
        if self.missing():
            return
        changed, self._changed = self._changed, set()
        if not self._all_listed:
            changed |= self.pools.keys()  # the endpoints of a predecessor go even if there are none now
        for number in sorted(changed):
            self._apply([spec for specs in self._specs.get(number, {}).values() for spec in specs], number)
        if not self._all_listed:
            self._all_listed = True
            self._listed()


def _derived_from(pool: InferencePool | None) -> tuple[object, ...]:
    """Returns that of which endpoints are derived."""
    return () if pool is None else (pool.selector, pool.ports)
