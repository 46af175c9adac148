"""Finds endpoints in Kubernetes: InferencePools select pods, and the pods have the addresses of the model servers.

    InferencePools of a namespace ─ choose ─▶ the InferencePool of each pool number ─┬─▶ endpoints of each pool ─▶ `apply`
    pods of the namespace ───────────────────────────────────────────────────────────┘

- One watch of InferencePools and one of pods serve all pools of a namespace. Every pod of the namespace is read, so a new selector or a new
  pool needs no further list. A pool without an existing InferencePool has no endpoints. This changes nothing for the other pools.
- For the only pool of a picker, the API server selects the InferencePool by name, and the pods by the selector. So pods are listed after
  the pool is known, and pods that only a new selector matches come with its first list. The picker is not ready without this pool.
- A new selector or new ports apply at once to the known pods. The picker also checks every pod against the selector, whatever the API
  server sends.
- `apply` is first called when the first list of pods is complete: until then the endpoints of a predecessor stay.
- `state_changed` is called with the reason why the picker is not ready ("" if it is ready), but only after the server has answered.

This module does not list and watch (`reflect` does), and does not assign slots (`endpoints` does).
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from epp.endpoints.label_selectors import Selector, parse
from workers.host.options import POOL_GROUP
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.supervisor.kube.api import Resource
from workers.supervisor.kube.known import ObjectChange
from workers.supervisor.kube.pods import Pod, decode_pod, specs_of
from workers.supervisor.kube.pool import PLURAL, VERSION, InferencePool, decode_pool
from workers.supervisor.kube.reflect import Reflector

if TYPE_CHECKING:
    from workers.host.options import Options

BATCH_S: Final = 0.005  # changes within this time are applied together
# The pause after an `apply`, as a multiple of its duration. So `apply` takes about 1/10 of the time.
APPLY_SHARE: Final = 10.0
APPLY_S_MAX: Final = 2.0  # the longest that a change waits, with tens of thousands of pods; with a thousand it is 0.1 s
NO_PODS: Final[Mapping[str, Pod]] = {}

Choose = Callable[[Mapping[str, InferencePool]], Mapping[int, InferencePool]]
Specs = dict[str, tuple[EndpointSpec, ...]]  # by the name of the pod; without pods that have no endpoint


class WantedPools(NamedTuple):
    """Says which endpoints to follow in a namespace: the endpoints of the pools with these numbers.

    `asks`: whether InferencePools are followed. `only`: the name of the InferencePool of a picker that has one pool, "" if flags describe
    this pool; None if the picker has several pools.
    """

    namespace: str
    numbers: Collection[int]
    asks: bool
    only: str | None


def fixed_pool(options: "Options") -> InferencePool | None:
    """Returns the pool that flags or a file describe by a selector and ports; None if they name an InferencePool. The flags must be
    valid.
    """
    selector = options.endpoint_selector
    return InferencePool(parse(selector), options.endpoint_target_ports) if selector else None


class Selecting:
    """Finds the pools that may select a pod without checking every pool: by one label of each selector."""

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
        """Returns the numbers of all pools that select the pod, and perhaps of some other pools."""
        return [*self._others, *(number for label in pod.labels for number in self._by_label.get(label, ()))]


class KubernetesDiscovery:
    """Follows the pods and the InferencePools of one namespace for all its pools. `pools`: the present InferencePools by number."""

    def __init__(
        self,
        reflector: Callable[..., Reflector[Any]],
        wanted: WantedPools,
        choose: Choose,
        *,
        apply: Callable[[Collection[EndpointSpec], int], None],
        state_changed: Callable[[str], None],
        mismatch: Callable[[InferencePool], str],
        successor: bool,
    ) -> None:
        """`reflector` creates a Reflector of a resource, with the other arguments that are the same for all.

        `choose` takes the InferencePools by name, and returns the InferencePool of each pool number, including pools that flags describe.
        `apply` gets all endpoints of one pool and its number, and `state_changed` gets each new value of `missing()`. `mismatch(pool)`
        returns why the configured parsers do not fit the only pool, or "". `successor`: whether a predecessor knew endpoints.
        """
        self.pools: Mapping[int, InferencePool] = {}
        self._reflector = reflector
        self._wanted = wanted
        self._choose = choose
        self._apply = apply
        self._state_changed = state_changed
        self._mismatch = mismatch
        self._successor = successor
        self._objects: Reflector[InferencePool] | None = None
        self._pods: Reflector[Pod] | None = None
        self._following: asyncio.Task[None] | None = None  # follows the pods
        self._seen = NO_PODS  # the pods of the last reflector that has listed them
        self._listed = False  # whether the pods of the present pools were listed
        self._selecting = Selecting(())
        self._specs: dict[int, Specs] = {}
        self._in: dict[str, list[int]] = {}  # name of a pod -> the pools that have endpoints of it
        self._changed = set(wanted.numbers)  # all pools, so that a predecessor's endpoints are removed even without new endpoints
        self._batches = Batches(self._apply_changed)
        self._reported: str | None = None  # the last state that was reported
        self._group: asyncio.TaskGroup

    async def run(self) -> None:
        """Follows pods and InferencePools until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                if self._wanted.only is None:
                    self._follow_pods("")
                if self._wanted.asks:
                    self._objects = self._pool_reflector()
                    self._group.create_task(self._objects.run())
                else:
                    self._pools_changed()
        finally:
            self._batches.cancel()

    def missing(self) -> str:
        """Returns what is missing before the picker can be ready, or "". If there are several pools, the picker is ready even if no pool
        exists.
        """
        namespace, only, objects, pods = self._wanted.namespace, self._wanted.only, self._objects, self._pods
        if only is not None and not self.pools:
            return f"InferencePool '{only}' in namespace {namespace} is not known: {self.unread(only)}"
        if objects is not None and not objects.synced:
            return f"{objects.resource} in namespace {namespace} are not known: {objects.problem or 'no answer yet'}"
        if not self._listed:
            why = (pods.problem if pods is not None else "") or "no answer yet"
            return f"{'pods' if only is None else 'the pods'} in namespace {namespace} are not known: {why}"
        return self._mismatch(self.pools[0]) if only is not None else ""

    def unread(self, name: str) -> str:
        """Returns why there is no InferencePool of this name."""
        objects = self._objects
        if objects is None:
            return "no answer yet"
        if objects.absent:
            return "its definition (CRD) is not installed"
        if unread := objects.unread(name):
            return f"it cannot be read: {unread}"
        return objects.problem or ("there is none" if objects.synced else "no answer yet")

    def apply_all(self) -> None:
        """Applies the endpoints of all pools soon, because the table may have lost some, or a pool may have another limit."""
        self._changed |= self.pools.keys()
        self._batches.soon()

    def _pool_reflector(self) -> Reflector[InferencePool]:
        return self._reflector(
            Resource(POOL_GROUP, VERSION, PLURAL, self._wanted.namespace),
            selectors={"fieldSelector": f"metadata.name={self._wanted.only}"} if self._wanted.only else {},
            decode=decode_pool,
            changed=lambda _: self._pools_changed(),
            expects=self._successor,
        )

    def _follow_pods(self, selector: str) -> None:
        """Starts to follow the pods that match a selector. The known pods stay until the new list is complete."""
        self._stop_following()
        self._pods = self._reflector(
            Resource("", "v1", "pods", self._wanted.namespace),
            selectors={"labelSelector": selector},
            decode=decode_pod,
            changed=self._pods_changed,
            expects=any(self._specs.values()) or (self._successor and not self._listed),
        )
        self._following = self._group.create_task(self._pods.run())

    def _stop_following(self) -> None:
        if self._following is not None:
            self._following.cancel()
        self._following = self._pods = None

    def _pools_changed(self) -> None:
        objects = self._objects
        if objects is not None and not objects.synced:
            return
        known = {name: pool for name, pool in objects.known.items() if not pool.deleted} if objects is not None else {}
        before, self.pools = self.pools, self._choose(known)
        self._selecting = Selecting((number, pool.selector) for number, pool in self.pools.items())
        moved = {n for n in {*before, *self.pools} if _derived_from(before.get(n)) != _derived_from(self.pools.get(n))}
        for number in moved:
            for name in self._specs.pop(number, ()):
                self._in[name].remove(number)
        if added := moved & self.pools.keys():
            of_added = Selecting((number, self.pools[number].selector) for number in added)
            for pod in self._seen.values():
                self._derive(pod, of_added.of(pod))
        self._changed |= moved
        if self._wanted.only is not None:
            self._follow_only(before.get(0), self.pools.get(0))
        self._batches.now()

    def _follow_only(self, before: InferencePool | None, pool: InferencePool | None) -> None:
        """Follows the pods of the only pool by its selector. Without the pool, no pod is known."""
        if pool is None:
            self._stop_following()
            self._seen, self._listed = NO_PODS, False
            self._in.clear()
        elif before is None or before.selector != pool.selector:
            self._follow_pods(pool.selector.text)

    def _pods_changed(self, change: ObjectChange[Pod]) -> None:
        for name in self._seen.keys() - change.known.keys() if change.listed else change.deleted:
            self._forget(name)
        self._seen = change.known
        for name, pod in change.upserted.items():
            self._forget(name)
            self._derive(pod, self._selecting.of(pod))
        if change.listed:
            self._listed = True
            self._batches.now()
        elif self._changed:
            self._batches.soon()

    def _forget(self, name: str) -> None:
        """Removes the endpoints of a pod from all pools."""
        for number in self._in.pop(name, ()):
            self._specs[number].pop(name, None)
            self._changed.add(number)

    def _derive(self, pod: Pod, numbers: Iterable[int]) -> None:
        """Adds the endpoints of a pod to these pools, if they select the pod."""
        for number in numbers:
            pool = self.pools[number]
            if specs := specs_of(pod, pool.selector, pool.ports, number):
                self._specs.setdefault(number, {})[pod.name] = specs
                self._in.setdefault(pod.name, []).append(number)
                self._changed.add(number)

    def _apply_changed(self) -> None:
        no_pool = self._wanted.only is not None and not self.pools
        if (self._objects is not None and not self._objects.synced) or not (self._listed or no_pool):
            return
        changed, self._changed = self._changed, set()
        for number in sorted(changed):
            self._apply([spec for specs in self._specs.get(number, {}).values() for spec in specs], number)
        if (missing := self.missing()) != self._reported:
            self._reported = missing
            self._state_changed(missing)


class Batches:
    """Applies changes in batches, and pauses between two of them, because each batch is also work for the workers."""

    def __init__(self, apply: Callable[[], None]) -> None:
        """`apply` applies all changes so far."""
        self._apply = apply
        self._due: asyncio.TimerHandle | None = None
        self._free_at = 0.0

    def soon(self) -> None:
        """Applies after a short delay, together with changes that come during the delay."""
        if self._due is None:
            loop = asyncio.get_running_loop()
            wait = min(max(BATCH_S, self._free_at - loop.time()), APPLY_S_MAX)
            self._due = loop.call_later(wait, self.now)

    def now(self) -> None:
        """Applies at once."""
        self.cancel()
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._apply()
        self._free_at = loop.time() + APPLY_SHARE * (loop.time() - began)

    def cancel(self) -> None:
        """Cancels the next batch."""
        if self._due is not None:
            self._due.cancel()
            self._due = None


def _derived_from(pool: InferencePool | None) -> tuple[object, ...]:
    """Returns the parts of a pool that determine its endpoints."""
    return () if pool is None else (pool.selector, pool.ports)
