"""For a picker with several pools: the memory that all pools need together, and the instance as each pool sees it.

Pools share the segments. Each has its own configuration, its own flow areas, and its own document of the latency model. The endpoint table
has the endpoints of all pools.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from epp.config.pools_file import KubePool
from epp.plugins.producers._precise_params import Settings
from epp.plugins.producers.precise_prefix import kv_settings
from epp.request.pool_choice import Matched, PoolChoice
from shm.documents import DocumentReader, DocumentWriter
from shm.observe import POOLS
from workers.process.generations import Bundle
from workers.process.instance import FIRST, NO_POOLS, Instance
from workers.process.layout import POOL_BANDS_MIN, POOL_HASH_LINES, Layout, Shape
from workers.process.loading import in_force
from workers.process.names import names_of
from workers.process.places import DEFAULT, Places, Pool
from workers.process.pool_list import Listed, PoolList
from workers.process.sources import Sources
from workers.shared.documents import EMPTY, NONE_PLACED, AssignedView, PlacedPools, assigned_of, encode
from workers.shared.objectives import static_bands

if TYPE_CHECKING:
    from workers.host.options import Options


def options_of(options: "Options", name: str, endpoints: str, max_endpoints: int, kube: KubePool | None) -> "Options":
    """Returns the options of the picker as one pool sees them."""
    in_kubernetes, kube = kube is not None, kube or KubePool()
    return msgspec.structs.replace(
        options,
        pool_name=name,
        endpoints=endpoints,
        max_endpoints=max_endpoints,
        pool_given=in_kubernetes and not kube.selector,
        pool_namespace=kube.namespace or options.pool_namespace,
        endpoint_selector=kube.selector,
        endpoint_target_ports=kube.ports,
    )


def create(
    options: "Options",
    pools: Sequence[Pool],
    choice: PoolChoice,
    ports: Mapping[int, str],
    places: Places | None = None,
    pool_list: PoolList = NO_POOLS,
) -> Instance:
    """Creates the instance of several pools. `options`: with the largest number of endpoints of all pools together. `choice`: finds the
    pool of a request. `ports`: port -> name of its pool. `places`: set if the picker finds InferencePools while it runs. `pool_list`: set
    if a file lists the pools. A pool without a name is a place for a later pool.

    Raises StartError, SegmentError or OSError, and then leaves nothing behind.
    """
    later = places.later if places is not None else 0
    instance = Instance.create(options, pools[0].config, layout_of(options, pools, places), ports, later)
    try:
        room = [pool.max_endpoints for pool in pools]
        instance = replace(with_pools(instance, pools), choice=choice, places=places, pool_list=pool_list, room=room)
        instance.lock.record(**{POOLS: instance.pool_names})
        return instance
    except BaseException:
        instance.unlink()
        raise


def layout_of(options: "Options", pools: Sequence[Pool], places: Places | None = None) -> Layout:
    """Returns the layout of the memory for all pools. Raises StartError."""
    later = places.configurations.values() if places is not None else ()
    least = max((len(static_bands(pool.config.flow)) for pool in later), default=0)
    bands = tuple(max(POOL_BANDS_MIN, least, len(static_bands(pool.config.flow))) for pool in pools)
    in_files = bool(options.objects_dir)
    objects = tuple(in_files or (pool.kube is not None and not pool.kube.selector) for pool in pools)
    configs = {id(pool.config): pool.config for pool in (*pools, *later)}
    settings = {id(config): kv_settings(config.pipeline.plugins.values()) for config in configs.values()}
    named = {pool.name: pool for pool in pools if pool.name} if places is None else places.configurations
    kv_of = {("" if name == DEFAULT and places is not None else name): settings[id(pool.config)] for name, pool in named.items()}
    sizes = tuple(pool.max_endpoints for pool in pools)
    shape = Shape(sizes, bands, POOL_HASH_LINES, objects, places is not None, kv_events_of(list(settings.values())), kv_of)
    return Layout(options, pools[0].config, names_of(options, configs.values()), shape).showing_all()


def kv_events_of(found: Sequence[Settings | None]) -> Settings | None:
    """Returns what the kv-events process needs for all pools with a precise prefix producer: room for the largest index that a pool asks
    for.

    Returns None if no pool has such a producer. The other values come from the first pool; `kv_events_differ` says which values must be
    equal.
    """
    settings = [each for each in found if each is not None]
    if not settings:
        return None
    most = 0 if any(not each.blocks_max for each in settings) else max(each.blocks_max for each in settings)
    shown = any(each.index_metrics for each in settings)
    return msgspec.structs.replace(settings[0], blocks_max=most, index_metrics=shown)


def kv_events_differ(one: Settings, other: Settings) -> str:
    """Returns the setting that differs between two pools although one process and one index serve both; "" if no setting differs."""
    pairs = {
        "kvCacheBackendConfigs": (one.tiers, other.tiers),
        "zmqEndpoint": (one.bind, other.bind),
        "topicFilter": (one.topic, other.topic) if one.bind else ("", ""),
        "speculativeTTL": (one.speculative_s, other.speculative_s),
    }
    return next((name for name, (first, second) in pairs.items() if first != second), "")


def with_pools(instance: Instance, pools: Sequence[Pool]) -> Instance:
    """Returns the instance with its pools. Each pool is the instance as that pool sees it. Raises Unusable."""
    known: dict[tuple[int, bool, bool], Instance] = {}
    views = []
    for number, pool in enumerate(pools):
        kube = pool.kube
        key = id(pool.config), kube is None, kube is not None and bool(kube.selector)
        view = viewed(instance, number, pool, known.get(key))
        known.setdefault(key, view)
        views.append(view)
    return replace(instance, pools=tuple(views))


def viewed(instance: Instance, number: int, pool: Pool, like: Instance | None = None) -> Instance:
    """Returns the instance as one pool sees it. `like`: the view of a pool with the same configuration and the same kind of endpoints."""
    options = options_of(instance.options, pool.name, pool.endpoints, pool.max_endpoints, pool.kube)
    if like is None:
        sources, layout = Sources(options, pool.config), instance.layout.of_pool(options, pool.config)
        like = replace(instance, config=pool.config, sources=sources, layout=layout, pools=()).with_scrape_tls()
    given = pool.given
    names, keys, path = instance.layout.names, pool.config.key_texts, options.plugin_path
    bundle = Bundle(FIRST, given.source, given.text, path, given.plugins, names, at=time.time(), keys=keys, pool=pool.name)
    memory, generations = instance.memory.of_pool(number), instance.generations.of(number)
    return replace(like, options=options, memory=memory, generations=generations, pool=number, bundle=bundle, kube=pool.kube, number=FIRST)


def create_places(options: "Options", places: Places) -> Instance:
    """Creates the instance with empty places. `options`: with the most endpoints of all places together. Raises as `create` does."""
    empty = [places.pool(EMPTY)] * len(places.ports)
    ports = {port: "of --pool-ports" for port in places.ports if port not in (0, options.grpc_port)}
    return create(options, empty, _choice(places, NONE_PLACED), ports, places)


def _choice(places: Places, names: PlacedPools) -> PoolChoice:
    return PoolChoice([Matched(*names.get(number, EMPTY)) for number in range(len(places.ports))])


def assigned(instance: Instance, names: PlacedPools) -> Instance:
    """Returns the instance with these InferencePools in its places. The views of places that do not change stay the same objects."""
    places = instance.places
    assert places is not None
    like = {id(view.config): view for view in instance.pools}
    views = list(instance.pools)
    for number, view in enumerate(instance.pools):
        placed = names.get(number, EMPTY)
        if view.options.pool_name != placed.name:
            pool = places.pool(placed)
            views[number] = viewed(instance, number, pool, like.get(id(pool.config)))
    return replace(instance, pools=tuple(views), choice=_choice(places, names))


def assigned_view(instance: Instance) -> AssignedView:
    """Returns the view of the document that says which InferencePools have which places. If the picker does not find InferencePools, the
    names in the document come from a file, for commands and pages, and the view never changes.
    """
    places = len(instance.pools) if instance.places is not None else 0
    return AssignedView(DocumentReader(instance.layout.documents, instance.memory.documents), places)


def relisted(instance: Instance, pool_list: PoolList, number: int) -> Instance:
    """Returns the instance with these pools in its places. `number`: the number of the list. Views of unchanged places stay the same
    objects.
    """
    views = list(instance.pools)
    for place, view in enumerate(instance.pools):
        before, entry = instance.pool_list.get(place), pool_list.get(place)
        if before == entry:
            continue
        entry = entry or Listed("")
        options = options_of(instance.options, entry.name, entry.endpoints, entry.max_endpoints, entry.kube_pool)
        view = replace(view, options=options, sources=Sources(options, view.config), kube=entry.kube_pool)
        if before is None or (before.name, before.since) != (entry.name, entry.since):
            view = replace(view, bundle=None, number=0)
        views[place] = view
    return chosen(replace(instance, pools=tuple(views), pool_list=pool_list, number=number))


def chosen(instance: Instance) -> Instance:
    """Returns the instance with the choice of the pool of a request, among the served pools of its list."""
    found = instance.pool_list
    matched = [found[place].matched if view.served else Matched("") for place, view in enumerate(instance.pools)]
    return replace(instance, choice=PoolChoice(matched))


def listed_now(instance: Instance) -> Instance:
    """Returns the instance with the list of pools that is in force. Raises GenerationLost."""
    if not instance.pool_list or not instance.outdated:
        return instance
    bundle = instance.generations.current()
    return relisted(instance, bundle.pool_list or {}, bundle.number)


def with_pool(instance: Instance, view: Instance) -> Instance:
    """Returns the instance with one of its pools under another configuration."""
    assert view.pool is not None
    views = [*instance.pools[: view.pool], view, *instance.pools[view.pool + 1 :]]
    layout = instance.layout
    if view.layout.areas is not layout.areas and view.layout.names.count > layout.names.count:
        layout = view.layout.showing_all()
    return replace(instance, pools=tuple(views), layout=layout, memory=instance.memory.under(layout))


def tell_assigned(instance: Instance, names: PlacedPools) -> None:
    """In the supervisor: tells all processes which pools have which places. Wakes the workers, so that they react at once."""
    DocumentWriter(instance.layout.documents, instance.memory.documents).write(assigned_of(len(instance.pools)), encode(names))
    instance.pipes.wake_workers()


def present(instance: Instance) -> Instance:
    """Returns the instance of a child at its start: with the configuration in force of the only pool, or with the present pools."""
    if not instance.pools:
        return in_force(instance)
    if instance.places is not None:
        return assigned(instance, assigned_view(instance).names() or NONE_PLACED)
    return chosen(listed_now(instance)) if instance.pool_list else instance
