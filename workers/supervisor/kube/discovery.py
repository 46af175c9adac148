"""Finds endpoints in Kubernetes: the pool selects pods, and the pods have the addresses of the model servers.

    InferencePool by name (or a selector and ports by flags) ─▶ selector, ports, protocol
    pods by selector                                         ─▶ endpoints ─▶ `apply`, all of them, a few times a second at most

- Without a pool there are no endpoints: pods are listed after the pool is known, and deleting the pool removes all endpoints.
- A new selector or new ports apply at once to the pods that are known. Pods that only the new selector matches come with its first list.
  The picker also checks every pod against the selector, whatever the API server sends.
- `apply` is first called when the first list of pods is complete: until then the endpoints of a predecessor stay.
- `state_changed` is called with the reason why the picker is not ready ("" if it is ready), but only after the server has answered.

What this does not do: list and watch (`reflect` does), or assign slots (`endpoints` does).
"""

import asyncio
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

from epp.endpoints.label_selectors import parse
from workers.host.options import POOL_GROUP
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.supervisor.kube.api import Api, Resource
from workers.supervisor.kube.batches import Batches
from workers.supervisor.kube.known import Change
from workers.supervisor.kube.pods import Pod, decode_pod, specs_of
from workers.supervisor.kube.pool import PLURAL, VERSION, InferencePool, decode_pool
from workers.supervisor.kube.reflect import Outage, Reflector

if TYPE_CHECKING:
    from workers.host.options import Options


class Wanted(NamedTuple):
    """Says which endpoints to follow: those of the InferencePool `name`, or those of `fixed`, a pool that flags describe."""

    namespace: str
    name: str = ""
    fixed: InferencePool | None = None


def wanted(options: "Options") -> Wanted:
    """Returns which endpoints the flags ask for. The flags must be valid."""
    if not options.endpoint_selector:
        return Wanted(options.pool_namespace, options.pool_name)
    fixed = InferencePool(parse(options.endpoint_selector), options.endpoint_target_ports)
    return Wanted(options.pool_namespace, fixed=fixed)


class KubernetesDiscovery:
    """Follows the pool and its pods."""

    def __init__(
        self,
        api: Api,
        wanted: Wanted,
        *,
        apply: Callable[[Collection[EndpointSpec]], None],
        state_changed: Callable[..., None],
        mismatch: Callable[[InferencePool], str],
        report: Callable[..., None],
        outage: Outage,
        successor: bool,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """`apply` gets all endpoints after a change, and `state_changed` gets each new value of `missing()`.

        `mismatch(pool)` returns why the configured parsers do not fit the pool; "" if they do. `successor`: whether a predecessor knew
        endpoints. `cpu` measures the work for each watch (`pace`).
        """
        self._api = api
        self._wanted = wanted
        self._apply = apply
        self._state_changed = state_changed
        self._mismatch = mismatch
        self._report = report
        self._outage = outage
        self._successor = successor
        self._cpu = cpu
        self._pool: InferencePool | None = wanted.fixed
        self._pools: Reflector[InferencePool] | None = None
        self._pods: Reflector[Pod] | None = None
        self._following: asyncio.Task[None] | None = None
        self._seen: dict[str, Pod] = {}  # all known pods, by the present selector or the one before
        # by the name of the pod; without pods that have no endpoint
        self._specs: dict[str, tuple[EndpointSpec, ...]] = {}
        self._applied = False  # whether the endpoints of this pool were applied at least once
        self._batches = Batches(self._apply_all)
        self._reported: str | None = None  # the last state that was reported
        self._group: asyncio.TaskGroup

    async def run(self) -> None:
        """Follows the pool and its pods until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                if self._wanted.fixed is not None:
                    self._follow_pods()
                else:
                    self._pools = self._pool_reflector()
                    self._group.create_task(self._pools.run())
        finally:
            self._batches.cancel()

    def missing(self) -> str:
        """Returns what is missing before the picker can be ready; "" if nothing is missing."""
        pools, pods = self._pools, self._pods
        if self._pool is None:
            why = "no answer yet"
            if pools is not None and (pools.absent or pools.problem or pools.synced):
                unread = pools.unread(self._wanted.name)
                why = f"it cannot be read: {unread}" if unread else pools.problem or "there is none"
                if pools.absent:
                    why = "its definition (CRD) is not installed"
            return f"InferencePool {self._named} is not known: {why}"
        if not self._applied:
            why = (pods.problem if pods is not None else "") or "no answer yet"
            return f"the pods in namespace {self._wanted.namespace} are not known: {why}"
        return self._mismatch(self._pool)

    @property
    def pool_uid(self) -> str:
        """The UID of the pool; "" while it is not known."""
        return self._pool.uid if self._pool is not None else ""

    @property
    def _named(self) -> str:
        return f"'{self._wanted.name}' in namespace {self._wanted.namespace}"

    def _pool_reflector(self) -> Reflector[InferencePool]:
        return Reflector(
            self._api,
            Resource(POOL_GROUP, VERSION, PLURAL, self._wanted.namespace),
            selectors={"fieldSelector": f"metadata.name={self._wanted.name}"},
            decode=decode_pool,
            changed=self._pool_changed,
            report=self._report,
            outage=self._outage,
            cpu=self._cpu,
            expects=self._successor,
        )

    def _follow_pods(self) -> None:
        """Starts to follow pods by the pool's present selector. The known pods stay until the new list is complete."""
        assert self._pool is not None
        if self._following is not None:
            self._following.cancel()
        self._pods = Reflector(
            self._api,
            Resource("", "v1", "pods", self._wanted.namespace),
            selectors={"labelSelector": self._pool.selector.text},
            decode=decode_pod,
            changed=self._pods_changed,
            report=self._report,
            outage=self._outage,
            cpu=self._cpu,
            expects=bool(self._specs) or (self._successor and not self._applied),
        )
        self._following = self._group.create_task(self._pods.run())

    def _pool_changed(self, change: Change[InferencePool]) -> None:
        before, found = self._pool, change.known.get(self._wanted.name)
        self._pool = found if found is not None and not found.deleted else None
        if self._pool is None:
            self._no_pool()
            return
        self._derive_endpoints()
        if before is None or before.selector != self._pool.selector:
            self._follow_pods()
        if self._applied:
            self._batches.now()
            self._report_state()

    def _no_pool(self) -> None:
        if self._following is not None:
            self._following.cancel()
        self._following = self._pods = None
        self._seen.clear()
        self._specs.clear()
        self._applied = False
        self._batches.now()
        self._report_state()

    def _pods_changed(self, change: Change[Pod]) -> None:
        assert self._pool is not None
        if change.listed:
            self._seen = dict(change.known)
            self._derive_endpoints()
            self._applied = True
            self._batches.now()
            self._report_state()
            return
        for name in change.deleted:
            self._seen.pop(name, None)
            self._specs.pop(name, None)
        for name, pod in change.upserted.items():
            self._seen[name] = pod
            self._specs.pop(name, None)
            if specs := specs_of(pod, self._pool.selector, self._pool.ports):
                self._specs[name] = specs
        if self._applied:
            self._batches.soon()

    def _derive_endpoints(self) -> None:
        """Derives the endpoints of all known pods from the pool's present selector and ports."""
        assert self._pool is not None
        specs = {name: specs_of(pod, self._pool.selector, self._pool.ports) for name, pod in self._seen.items()}
        self._specs = {name: endpoints for name, endpoints in specs.items() if endpoints}

    def _report_state(self) -> None:
        """Calls `state_changed` if the state has changed."""
        if (missing := self.missing()) != self._reported:
            self._reported = missing
            self._state_changed(missing)

    def _apply_all(self) -> None:
        self._apply([spec for specs in self._specs.values() for spec in specs])
