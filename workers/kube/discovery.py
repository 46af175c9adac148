"""Endpoints from Kubernetes: the pool tells which pods count, the pods tell where the model servers are.

    InferencePool by name (or a selector and ports by flags) ─▶ selector, ports, protocol
    pods by selector                                         ─▶ endpoints ─▶ `apply`, all of them, a few times a second at most

- No pool, no endpoints: pods are asked for once the pool is known. A pool that is deleted takes all endpoints with it.
- A new selector or other ports count at once for the pods that are known; pods that the new selector adds come with its first
  list. The selector is held against every pod here too, whatever the API server sends.
- `apply` is not called before the first list of pods is complete: what a predecessor knew stays until then.
- `stands` is told why the picker is not ready ("" when it is), and nothing before the server has said something.

What this does not do: list and watch (`reflect` does), or give out slots (`endpoints` does).
"""

import asyncio
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final, NamedTuple

from workers.discovery import EndpointSpec
from workers.kube.api import Resource
from workers.kube.pods import Pod, decode_pod, specs_of
from workers.kube.pool import PLURAL, POOL_GROUP, VERSION, Pool, decode_pool
from workers.kube.reflect import Api, Change, Outage, Reflector
from workers.kube.selector import parse

if TYPE_CHECKING:
    from workers.cli.options import Options

TOGETHER_S: Final = 0.005  # changes within it are applied as one
APPLY_SHARE: Final = 10.0  # applying takes about one part in so many of the time: workers have work from it too
APPLY_S_MAX: Final = 0.1  # but no change waits for longer


class Wanted(NamedTuple):
    """Whose endpoints: a pool's by `name`, or those of `fixed`, which needs no pool."""

    namespace: str
    name: str = ""
    fixed: Pool | None = None


def wanted(options: "Options") -> Wanted:
    """As the flags say it; they were checked."""
    if not options.endpoint_selector:
        return Wanted(options.pool_namespace, options.pool_name)
    fixed = Pool(parse(options.endpoint_selector), options.endpoint_target_ports)
    return Wanted(options.pool_namespace, fixed=fixed)


class KubernetesDiscovery:
    """`run` follows pool and pods. `apply` gets all endpoints; `stands` hears when `standing` is another."""

    def __init__(
        self,
        api: Api,
        wanted: Wanted,
        *,
        apply: Callable[[Collection[EndpointSpec]], None],
        stands: Callable[[str], None],
        fits: Callable[[Pool], str],
        report: Callable[[str], None],
        outage: Outage,
        successor: bool,
    ) -> None:
        self._api = api
        self._wanted = wanted
        self._apply = apply
        self._stands = stands
        self._fits = fits
        self._report = report
        self._outage = outage
        self._successor = successor
        self._pool: Pool | None = wanted.fixed
        self._pools: Reflector[Pool] | None = None
        self._pods: Reflector[Pod] | None = None
        self._following: asyncio.Task[None] | None = None
        self._seen: dict[str, Pod] = {}  # all that are known, of this selector or the one before
        self._specs: dict[str, tuple[EndpointSpec, ...]] = {}  # by pod; only of those that have any
        self._applied = False  # at least once
        self._due: asyncio.TimerHandle | None = None
        self._free_at = 0.0
        self._told: str | None = None
        self._group: asyncio.TaskGroup

    async def run(self) -> None:
        """Follow pool and pods; ends when cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                if self._wanted.fixed is not None:
                    self._follow_pods()
                else:
                    self._pools = self._pool_reflector()
                    self._group.create_task(self._pools.run())
        finally:
            if self._due is not None:
                self._due.cancel()

    def standing(self) -> str:
        """Why the picker is not ready, as far as this knows; "" when it is."""
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
        return self._fits(self._pool)

    @property
    def _named(self) -> str:
        return f"'{self._wanted.name}' in namespace {self._wanted.namespace}"

    def _pool_reflector(self) -> Reflector[Pool]:
        return Reflector(
            self._api,
            Resource(POOL_GROUP, VERSION, PLURAL, self._wanted.namespace),
            field=f"metadata.name={self._wanted.name}",
            decode=decode_pool,
            changed=self._pool_changed,
            report=self._report,
            outage=self._outage,
            expects=self._successor,
        )

    def _follow_pods(self) -> None:
        """Anew, with the selector that the pool has now; those that are known are kept until the list is complete."""
        assert self._pool is not None
        if self._following is not None:
            self._following.cancel()
        self._pods = Reflector(
            self._api,
            Resource("", "v1", "pods", self._wanted.namespace),
            labels=self._pool.selector.text,
            decode=decode_pod,
            changed=self._pods_changed,
            report=self._report,
            outage=self._outage,
            expects=bool(self._specs) or (self._successor and not self._applied),
        )
        self._following = self._group.create_task(self._pods.run())

    def _pool_changed(self, change: Change[Pool]) -> None:
        before, found = self._pool, change.known.get(self._wanted.name)
        self._pool = found if found is not None and not found.deleted else None
        if self._pool is None:
            self._no_pool()
            return
        self._judge_all()
        if before is None or before.selector != self._pool.selector:
            self._follow_pods()
        if self._applied:
            self._now()
            self._tell()

    def _no_pool(self) -> None:
        if self._following is not None:
            self._following.cancel()
        self._following = self._pods = None
        self._seen.clear()
        self._specs.clear()
        self._applied = False
        self._now()
        self._tell()

    def _pods_changed(self, change: Change[Pod]) -> None:
        assert self._pool is not None
        if change.listed:
            self._seen = dict(change.known)
            self._judge_all()
            self._applied = True
            self._now()
            self._tell()
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
            self._soon()

    def _judge_all(self) -> None:
        """Against the pool as it is now."""
        assert self._pool is not None
        judged = {name: specs_of(pod, self._pool.selector, self._pool.ports) for name, pod in self._seen.items()}
        self._specs = {name: specs for name, specs in judged.items() if specs}

    def _tell(self) -> None:
        """How things stand, when that is something else."""
        if (standing := self.standing()) != self._told:
            self._told = standing
            self._stands(standing)

    def _soon(self) -> None:
        """Apply what has changed, together with what changes next."""
        if self._due is None:
            loop = asyncio.get_running_loop()
            wait = min(max(TOGETHER_S, self._free_at - loop.time()), APPLY_S_MAX)
            self._due = loop.call_later(wait, self._now)

    def _now(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._apply([spec for specs in self._specs.values() for spec in specs])
        self._free_at = loop.time() + APPLY_SHARE * (loop.time() - began)
