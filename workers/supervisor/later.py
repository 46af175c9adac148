"""Takes over, in a running supervisor, later configurations, and which pools have which places.

    a word of the parent has moved ─▶ thread: load, one pool after the other ─▶ loop: data layer, endpoints, bands, pages ─▶ report
                                   └▶ list of pools ─▶ endpoints of the pools that come, change or go
    InferencePools have other places (`kubernetes`) ─▶ assign

Endpoints, their metrics, and the connections of the metrics port stay. If a step fails, the supervisor keeps the configuration of that pool
and reports the reason.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

import structlog

from shm.areas import SUPERVISOR_AREA, Area
from workers.host.log import error_text
from workers.host.yaml_files import DiscoveryError
from workers.process import StartError
from workers.process.generations import GenerationLost
from workers.process.instance import Instance
from workers.process.loading import in_force
from workers.process.pool_views import assigned, chosen, listed_now, present, tell_assigned, with_pool
from workers.shared.documents import Placed, PlacedPools
from workers.supervisor.background import Background
from workers.supervisor.configured_endpoints import follow_configured
from workers.supervisor.data_layer import DataLayer, read_by
from workers.supervisor.index_keeper import IndexKeeper
from workers.supervisor.objects_of_pools import PoolsObjects
from workers.supervisor.page_port import PagePort
from workers.supervisor.predecessor import Predecessor
from workers.supervisor.record_keeper import RecordKeeper
from workers.supervisor.watches import Watches
from workers.worker.adoption import Loading, Unusable, show

log = structlog.get_logger()


def at_start(instance: Instance) -> Instance:
    """Returns the instance of a supervisor at its start: each pool has its configuration in force, or if that fails, the previous
    configuration.
    """
    instance = present(instance)
    for view in instance.pools:
        if view.served and view.outdated:
            try:
                instance = with_pool(instance, in_force(view).with_scrape_tls())
            except Exception as problem:
                refuse(view, view.generations.number, problem)
    return instance


def refuse(view: Instance, number: int, problem: BaseException) -> None:
    """Reports that this supervisor cannot use a configuration of the pool of `view`."""
    log.error("configuration cannot be taken over", generation=number, error=error_text(problem), **view.named)
    view.reports.refused(SUPERVISOR_AREA, number, error_text(problem), view.generations.key)


class Supervised(Protocol):
    """The part of a supervisor that `Later` uses. `report`: logs a problem. `checks`: its regular checks, from `watches`."""

    instance: Instance
    watches: Watches
    checks: list[Callable[[float], None]]
    predecessor: Predecessor
    area: Area
    background: Background
    index: IndexKeeper
    data: DataLayer
    records: RecordKeeper
    pages: PagePort
    objects: PoolsObjects
    report: Callable[..., None]

    def renew_data(self) -> None: ...
    def pools_replaced(self) -> None: ...
    def limits_changed(self) -> None: ...
    def file_changed(self) -> None: ...


class Later:
    """Keeps a supervisor up to date. `look` is called at each heartbeat."""

    def __init__(self, supervisor: Supervised) -> None:
        self._supervisor = supervisor
        self._changes = -1
        self._outdated: list[int] = []  # the places of pools in `every` with changed configurations
        self._loading: Loading | None = None
        self._unusable: dict[int, Unusable] = defaultdict(Unusable)
        self._changing = asyncio.Lock()
        self._following: dict[int, list[asyncio.Task[Any]]] = {}  # the tasks that follow the endpoints of a pool without Kubernetes
        self._show(supervisor.instance.every)

    async def follow_endpoints(self) -> None:
        """Starts to follow the endpoints of pools that are not in Kubernetes. Raises DiscoveryError for a bad flag or file."""
        successor = self._supervisor.predecessor.existed
        configured = [
            view for view in self._supervisor.instance.every if not view.sources.in_kubernetes and (view.pool is None or view.served)
        ]
        # All pools at once, so that their endpoints are published together.
        await asyncio.gather(*(self._follow(view, successor=successor) for view in configured))

    def look(self) -> None:
        """Begins to take over the configurations in force, unless this supervisor already uses them."""
        words = self._supervisor.instance.words
        if words.changes != self._changes and not self._changing.locked():
            self._changes = words.changes
            self._outdated = [place for place, view in enumerate(self._supervisor.instance.every) if self._is_outdated(view)]
            instance = self._supervisor.instance
            with contextlib.suppress(GenerationLost):  # another list follows
                if (listed := listed_now(instance)) is not instance:
                    self._supervisor.background.keep(self._use_list(listed))
                    self._changes = -1  # looks again afterwards
                    return
        if self._outdated and self._loading is None and not self._changing.locked():
            self._load_next()

    def _is_outdated(self, view: Instance) -> bool:
        gone = view.pool is not None and not view.served and view.number > 0  # its configuration was taken back
        return view.outdated or gone

    def _load_next(self) -> None:
        now, views = asyncio.get_running_loop().time(), self._supervisor.instance.every
        for place in list(self._outdated):
            view = views[place]
            number = view.generations.number
            if not self._is_outdated(view):
                self._outdated.remove(place)
            elif not view.outdated:
                self._outdated.remove(place)
                self._supervisor.background.keep(self._use_nothing(view))
                return
            elif not self._unusable[place].has(number, now):
                self._loading = Loading(view, lambda loading, found, view=view: self._loaded(view, loading, found))  # type: ignore[misc]
                return

    def _loaded(self, view: Instance, loading: Loading, found: Instance | BaseException) -> None:
        self._loading = None
        if isinstance(found, Instance):
            try:
                self._supervisor.background.keep(self._use(found.with_scrape_tls()))
            except StartError as unusable:
                found = unusable
        if isinstance(found, BaseException):
            self._unusable[view.pool or 0].add(loading.number, asyncio.get_running_loop().time())
            refuse(view, loading.number, found)

    async def _use(self, view: Instance) -> None:
        """Takes over a later configuration of a pool."""
        supervisor = self._supervisor
        async with self._changing:
            before, place = supervisor.instance, view.pool or 0
            old = before.every[place]
            if old.options.pool_name != view.options.pool_name:
                return  # another pool has got the place meanwhile
            view = replace(view, options=old.options)
            supervisor.instance = view if view.pool is None else with_pool(before, view)
            if before.pool_list:
                supervisor.instance = chosen(supervisor.instance)
            renewed = read_by(old) != read_by(view)
            if renewed or before.layout.table.columns != supervisor.instance.layout.table.columns:
                self._renew_data(but=place if renewed and not view.sources.in_kubernetes else None)
            if view.pool is not None and not old.used and not view.sources.in_kubernetes:
                await self._follow_new(view)
            elif renewed and not view.sources.in_kubernetes:
                await self._follow(view, successor=True)
            supervisor.objects.reconfigured(old, view)
            self._shown([view])
            view.reports.adopted(SUPERVISOR_AREA, view.number, view.generations.key)

    async def _use_nothing(self, view: Instance) -> None:
        """Ends the use of a configuration that was taken back and has no predecessor."""
        async with self._changing:
            view = replace(view, bundle=None, number=0)
            self._supervisor.instance = with_pool(self._supervisor.instance, view)
            self._leave(view.pool or 0)
            self._shown([view])

    async def _use_list(self, instance: Instance) -> None:
        """Takes over another list of pools."""
        supervisor = self._supervisor
        async with self._changing:
            before, supervisor.instance = supervisor.instance, instance
            # First, because what was learned of a pool that is gone is saved with the endpoints of the pool.
            self._places_changed({place: Placed(entry.name, entry.port) for place, entry in instance.pool_list.items()})
            for place, (old, new) in enumerate(zip(before.pools, instance.pools, strict=True)):
                if old is new:
                    continue
                if not new.used:
                    self._leave(place)
                elif _given(old) == _given(new):
                    continue
                elif new.sources.in_kubernetes:
                    supervisor.limits_changed()
                else:
                    await self._follow_new(new)
            self._shown([])

    def assign(self, names: PlacedPools) -> None:
        """Takes over which InferencePools have which places, and tells the other processes."""
        supervisor = self._supervisor
        before, instance = supervisor.instance, assigned(supervisor.instance, names)
        supervisor.instance = instance
        if [id(pool.config) for pool in before.pools] != [id(pool.config) for pool in instance.pools]:
            self._renew_data()
        self._places_changed(names)
        self._shown([new for old, new in zip(before.pools, instance.pools, strict=True) if old is not new])

    def _places_changed(self, names: PlacedPools) -> None:
        """Tells the other processes and the parts of the supervisor that pools have other places."""
        supervisor = self._supervisor
        tell_assigned(supervisor.instance, names)
        log.info("pools that are served", pools=sorted(each.name for each in names.values()))
        supervisor.pools_replaced()
        supervisor.objects.use(supervisor.instance.pools)

    async def _follow(self, view: Instance, *, successor: bool) -> None:
        """Follows the endpoints of a pool under its present configuration. Raises DiscoveryError."""
        supervisor, place = self._supervisor, view.pool or 0
        for task in self._following.pop(place, ()):
            task.cancel()
        report, changed = supervisor.report, supervisor.file_changed
        self._following[place] = await follow_configured(
            view, lambda: supervisor.data.table, supervisor.background, report, changed, successor=successor
        )

    async def _follow_new(self, view: Instance) -> None:
        """Follows other endpoints than before. If their file is bad, reports this, and waits until the file is good."""
        try:
            await self._follow(view, successor=False)
        except DiscoveryError:
            await self._follow(view, successor=True)

    def _leave(self, place: int) -> None:
        """Ends the use of the endpoints of a pool."""
        for task in self._following.pop(place, ()):
            task.cancel()
        self._supervisor.data.table.apply((), pool=place)

    def _renew_data(self, but: int | None = None) -> None:
        """Creates the data layer again, for another configuration. It continues with the endpoints of all pools.

        `but`: the endpoints of this pool are followed anew afterwards.
        """
        self._supervisor.renew_data()
        for place in range(len(self._supervisor.instance.every)):
            if place != but:
                self._supervisor.data.table.resume(place)

    def _shown(self, views: Iterable[Instance]) -> None:
        supervisor = self._supervisor
        supervisor.checks = supervisor.watches.of(supervisor.instance, supervisor.index)
        supervisor.pages.use(supervisor.instance, supervisor.data.table)
        supervisor.records.use(supervisor.instance)
        self._show(views)

    def _show(self, views: Iterable[Instance]) -> None:
        """Shows which configurations this supervisor uses."""
        area = self._supervisor.area
        for view in (self._supervisor.instance, *views):
            show(area, view)


def _given(view: Instance) -> tuple[str, int]:
    """Returns the endpoints in the list of pools, "" for a pool that finds its endpoints in another way, and their limit."""
    return view.options.endpoints, view.options.max_endpoints
