"""Declares the parameters of the precise prefix producer, as in the reference picker, and checks them."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from epp.prefix.held import BLOCK_TOKENS_MAX
from epp.prefix.streams import WEIGHT_ONE
from epp.quantities import named_duration

TIERS_MAX = 5  # tiers with a weight of their own; the others share one tier
WEIGHT_MAX = 1000.0
# Bytes of shared memory per block: three places in the index, and four thirds of a place in the table of links.
ENTRY_BYTES = 68
PORT = 5557

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Size = Annotated[float, msgspec.Meta(ge=1)]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    pass


class TokenProcessor(_Struct, frozen=True):
    """How servers cut prompts into blocks.

    block_size_tokens: The block size, in tokens, that `epp doctor` expects the servers to report. Default: any. Routing always uses the
    size that each server reports.
    block_size: Deprecated: use `block_size_tokens`.
    hash_seed: Accepted, without effect: the keys of blocks stay in this picker, which shares no index.
    hash_algorithm: Accepted, without effect: the keys of blocks stay in this picker, which shares no index.
    """

    block_size_tokens: Annotated[int, msgspec.Meta(ge=0, le=BLOCK_TOKENS_MAX)] = 0
    block_size: Annotated[int, msgspec.Meta(ge=0, le=BLOCK_TOKENS_MAX)] = 0
    hash_seed: str = ""
    hash_algorithm: Literal["", "cbor-fnv", "xxh64"] = ""


class InMemory(_Struct, frozen=True):
    """The size of the index in blocks.

    size: The most blocks that the index has room for.
    pod_cache_size: Accepted, without effect: any number of endpoints may hold a block.
    """

    size: Size | None = None
    pod_cache_size: Annotated[int, msgspec.Meta(ge=0)] = 0


class CostAware(_Struct, frozen=True):
    """The size of the index in bytes.

    size: The most bytes that the index takes, such as 2GiB.
    """

    size: str = ""


class Redis(_Struct, frozen=True):
    """Settings of an index in Redis. They have no effect, because the index lies in the picker's shared memory.

    address: Accepted, without effect.
    """

    address: str = ""


class BlockIndex(_Struct, frozen=True):
    """Limits of the index.

    in_memory_config: The size of the index in blocks.
    cost_aware_memory_config: The size of the index in bytes. If given, inMemoryConfig has no effect.
    redis_config: Accepted, without effect: the index is in this picker's shared memory.
    valkey_config: Accepted, without effect: the index is in this picker's shared memory.
    enable_metrics: Export metrics of the index.
    metrics_logging_interval: Accepted, without effect: the metrics port has the figures.
    """

    in_memory_config: InMemory | None = None
    cost_aware_memory_config: CostAware | None = None
    redis_config: Redis | None = None
    valkey_config: Redis | None = None
    enable_metrics: bool = False
    metrics_logging_interval: int | str = 0


class Backend(_Struct, frozen=True):
    """The weight of a tier's blocks in a match.

    name: The tier, as servers name it.
    weight: What a block in this tier counts.
    """

    name: str
    weight: Annotated[float, msgspec.Meta(ge=0, le=WEIGHT_MAX)] = 1.0


class Indexer(_Struct, frozen=True):
    """The index, and the weights of the tiers.

    kv_block_index_config: Limits of the index.
    kv_cache_backend_configs: Weights of tiers. Default: gpu 1 and cpu 0.8; a tier that is not listed has 1.
    """

    kv_block_index_config: BlockIndex = BlockIndex()
    kv_cache_backend_configs: list[Backend] | None = None


class PodDiscovery(_Struct, frozen=True):
    """Where the servers publish their events.

    pod_label_selector: Accepted, without effect: the endpoints of the pool are followed.
    pod_namespace: Accepted, without effect: the endpoints of the pool are followed.
    socket_port: The port of rank 0; rank n publishes on this port + n.
    replay_socket_port: The port on which rank 0 repeats missed events. Default: no port.
    """

    pod_label_selector: str = ""
    pod_namespace: str = ""
    socket_port: Port = PORT
    replay_socket_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None


class KvEvents(_Struct, frozen=True):
    """How events arrive.

    zmq_endpoint: The address that the picker binds, for servers that connect to the picker; the picker then connects to no server.
    topic_filter: The beginning of the topics to read.
    concurrency: Accepted for compatibility: one process reads all events.
    engine_type: Accepted for compatibility: the events of both engines are read alike.
    discover_pods: Connect to the endpoints of the pool.
    pod_discovery_config: The ports of the endpoints.
    """

    zmq_endpoint: str = ""
    topic_filter: str = "kv@"
    concurrency: Annotated[int, msgspec.Meta(ge=0)] = 4
    engine_type: Literal["", "vllm", "sglang"] = ""
    discover_pods: bool = True
    pod_discovery_config: PodDiscovery = PodDiscovery()


class Parameters(_Struct, frozen=True):
    """Describes the servers' caches, and how events about the caches arrive.

    token_processor_config: How servers cut prompts into blocks.
    indexer_config: The index, and the weights of the tiers.
    kv_events_config: How events arrive.
    speculative_indexing: Count the blocks of a request at its endpoint before the server reports them.
    speculative_ttl: How long blocks count before the server reports them, with `speculativeIndexing`.
    """

    token_processor_config: TokenProcessor = TokenProcessor()
    indexer_config: Indexer = Indexer()
    kv_events_config: KvEvents = KvEvents()
    speculative_indexing: bool = False
    speculative_ttl: str = msgspec.field(name="speculativeTTL", default="2s")


DEFAULT_BACKENDS = (Backend("gpu", 1.0), Backend("cpu", 0.8))


class Settings(msgspec.Struct, frozen=True):
    """Holds the parameters that the kv-events process and `epp doctor` need. `block_tokens`: the block size that `epp doctor` expects.

    `tiers`: (name, weight in thousandths). `replay_port`: 0 without replays.

    `bind`: the address to bind; "" to connect to the endpoints. `blocks_max`: the index's limit in blocks; 0 if none is configured.
    `speculative_s`: for how long blocks count before a server reports them; at 0, they do not count before.
    """

    block_tokens: int
    tiers: tuple[tuple[str, int], ...]
    blocks_max: int
    bind: str
    topic: str
    port: int
    replay_port: int
    speculative_s: float
    index_metrics: bool


def settings(params: Parameters) -> Settings:
    """Returns the settings, after a check of the parameters together. Raises ValueError with a text `parameter: reason`."""
    events, indexer = params.kv_events_config, params.indexer_config
    discovery = events.pod_discovery_config
    backends = indexer.kv_cache_backend_configs
    replay = discovery.replay_socket_port or 0
    path = "kvEventsConfig.podDiscoveryConfig.replaySocketPort"
    if replay == discovery.socket_port:
        raise ValueError(f"{path}: {replay} is also the socketPort; servers publish and replay on two ports")
    if events.zmq_endpoint and not events.zmq_endpoint.startswith(("tcp://", "ipc://")):
        raise ValueError(f"kvEventsConfig.zmqEndpoint: '{events.zmq_endpoint[:128]}' is no address to bind; write for example tcp://*:5557")
    if not events.zmq_endpoint and not events.discover_pods:
        raise ValueError("kvEventsConfig.discoverPods: is false and zmqEndpoint is empty, so no events can arrive; set one of them")
    named = DEFAULT_BACKENDS if backends is None else tuple(backends)
    names = [backend.name.lower() for backend in named]
    if len(named) > TIERS_MAX:
        raise ValueError(f"indexerConfig.kvCacheBackendConfigs: has {len(named)} tiers; at most {TIERS_MAX} can have a weight")
    if len(set(names)) < len(names):
        raise ValueError("indexerConfig.kvCacheBackendConfigs: names a tier twice; remove one of the entries")
    return Settings(
        block_tokens=params.token_processor_config.block_size_tokens or params.token_processor_config.block_size,
        tiers=tuple((name, round(backend.weight * WEIGHT_ONE)) for name, backend in zip(names, named, strict=True)),
        blocks_max=_blocks_max(indexer.kv_block_index_config),
        bind=events.zmq_endpoint,
        topic=events.topic_filter,
        port=discovery.socket_port,
        replay_port=0 if events.zmq_endpoint else replay,
        speculative_s=_speculative_s(params),
        index_metrics=indexer.kv_block_index_config.enable_metrics,
    )


COUNTS_WITH: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "speculativeTTL": ("speculativeIndexing", (True,)),
    # The picker cannot connect to servers that connect to it, and gets no replays from them.
    "kvEventsConfig.podDiscoveryConfig.socketPort": ("kvEventsConfig.zmqEndpoint", ("",)),
    "kvEventsConfig.podDiscoveryConfig.replaySocketPort": ("kvEventsConfig.zmqEndpoint", ("",)),
}
RENAMED: Mapping[str, str] = {"tokenProcessorConfig.blockSize": "tokenProcessorConfig.blockSizeTokens"}


def deprecated(params: Parameters) -> Mapping[str, str]:
    """Maps the deprecated parameters that are in use to their current names."""
    return RENAMED if params.token_processor_config.block_size else {}


def _blocks_max(index: BlockIndex) -> int:
    """Returns the limit of the index in blocks; 0 without a limit. A limit in bytes takes precedence over a limit in blocks."""
    if index.cost_aware_memory_config is not None and index.cost_aware_memory_config.size:
        return max(1, _bytes(index.cost_aware_memory_config.size) // ENTRY_BYTES)
    if index.in_memory_config is not None and index.in_memory_config.size:
        return int(index.in_memory_config.size)
    return 0


def _bytes(text: str) -> int:
    units = {"": 1, "b": 1, **{f"{unit}{end}": 1024**power for power, unit in enumerate("kmgt", 1) for end in ("ib", "i")},
             **{f"{unit}{end}": 1000**power for power, unit in enumerate("kmgt", 1) for end in ("b", "")}}  # fmt: skip
    digits = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(digits) :].strip().lower()
    try:
        size = float(digits) * units[unit]
    except (ValueError, KeyError):
        size = 0.0
    if not 1 <= size < 1 << 60:
        raise ValueError(f"indexerConfig.kvBlockIndexConfig.costAwareMemoryConfig.size: '{text[:64]}' is no size; write for example 2GiB")
    return int(size)


def _speculative_s(params: Parameters) -> float:
    seconds = named_duration("speculativeTTL", params.speculative_ttl) if params.speculative_ttl else 2.0
    if not 0 < seconds <= 3600:
        raise ValueError(f"speculativeTTL: '{params.speculative_ttl}' is not above 0 and at most 1h; write for example 2s")
    return seconds if params.speculative_indexing else 0.0
