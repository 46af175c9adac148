"""The pools of a picker that has several: the memory that they need together, and the instance as each of them sees it.

Pools share the segments. Each has its own configuration, its own flow lanes, and its own document of the latency model. The endpoint table
has the endpoints of all.
"""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from epp.config.pools import KubePool
from epp.request.pools import PoolChoice
from shm.observe import POOLS
from workers.process.generations import Bundle
from workers.process.instance import Instance
from workers.process.layout import POOL_BANDS_MIN, POOL_HASH_LINES, Layout, Shape
from workers.process.names import names_of
from workers.process.sources import Sources
from workers.shared.objectives import static_bands

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from epp.config.effective import EffectiveConfig
    from workers.host.options import Options
    from workers.process.loading import Given


class Pool(NamedTuple):
    """One pool as the start has read it. Pools with the same text share `config`.

    `endpoints`: as in --endpoints; "": the configuration says where they come from. `max_endpoints`: their limit.
    `models`: those that belong to it by their whole names. `kube`: where the endpoints are in Kubernetes; None: they are not there.
    """

    name: str
    given: "Given"
    config: "EffectiveConfig"
    endpoints: str
    max_endpoints: int
    models: tuple[str, ...] = ()
    kube: KubePool | None = None


def options_of(options: "Options", name: str, endpoints: str, max_endpoints: int, kube: KubePool | None) -> "Options":
    """Returns the options of the picker as one pool sees them."""
    kube = kube or KubePool()
    return msgspec.structs.replace(
        options,
        pool_name=name,
        endpoints=endpoints,
        max_endpoints=max_endpoints,
        pool_given=bool(kube.name),
        pool_namespace=kube.namespace or options.pool_namespace,
        endpoint_selector=kube.selector,
        endpoint_target_ports=kube.ports,
    )


def create(options: "Options", pools: "Sequence[Pool]", choice: PoolChoice, ports: "Mapping[int, str]") -> Instance:
    """Creates the instance of several pools. `options`: with the most endpoints of all pools together. `choice`: finds their requests.
    `ports`: port -> name of the pool to which it belongs.

    Raises StartError, SegmentError or OSError, and then leaves nothing behind.
    """
    instance = Instance.create(options, pools[0].config, layout_of(options, pools), ports)
    try:
        instance = replace(with_pools(instance, pools), choice=choice)
        bundle = instance.pools[0].bundle
        assert bundle is not None
        instance.begin(bundle)
        instance.lock.record(**{POOLS: instance.pool_names})
        return instance
    except BaseException:
        instance.unlink()
        raise


def layout_of(options: "Options", pools: "Sequence[Pool]") -> Layout:
    """Returns the layout of the memory for all pools. Raises StartError."""
    bands = tuple(max(POOL_BANDS_MIN, len(static_bands(pool.config.flow))) for pool in pools)
    objects = tuple(pool.kube is not None and bool(pool.kube.name) for pool in pools)
    shape = Shape(tuple(pool.max_endpoints for pool in pools), bands, POOL_HASH_LINES, objects)
    configs = {id(pool.config): pool.config for pool in pools}
    return Layout(options, pools[0].config, names_of(options, configs.values()), shape).showing_all()


def with_pools(instance: Instance, pools: "Sequence[Pool]") -> Instance:
    """Returns the instance with its pools: each is the instance as that pool sees it. Raises Unusable."""
    known: dict[tuple[int, bool, bool], Instance] = {}
    views = []
    for number, pool in enumerate(pools):
        options = options_of(instance.options, pool.name, pool.endpoints, pool.max_endpoints, pool.kube)
        key = id(pool.config), options.pool_given, bool(options.endpoint_selector)
        like = known.get(key)
        if like is None:
            sources, layout = Sources(options, pool.config), instance.layout.of_pool(options, pool.config)
            like = known[key] = replace(instance, config=pool.config, sources=sources, layout=layout).with_scrape_tls()
        bundle = Bundle(
            instance.number,
            pool.given.source,
            pool.given.text,
            options.plugin_path,
            pool.given.plugins,
            instance.layout.names,
            at=time.time(),
            keys=pool.config.key_texts,
        )
        views.append(replace(like, options=options, memory=instance.memory.of_pool(number), pool=number, bundle=bundle, kube=pool.kube))
    return replace(instance, pools=tuple(views), models=[(pool.name, pool.models) for pool in pools])
