"""Typed keys to data of endpoints and requests. Only the object that declares a key can read its values.

    key      one value per   written by                                         read by
    Column   endpoint        the scraper, or the workers for load in flight     candidates[COLUMN]
    Datum    request         a DataProducer, or a plugin for its later calls    request[DATUM]

A plugin declares the keys that it uses in `consumes`, `optional`, `produces` and `keeps` (`epp.plugin.Plugin`). Keys compare by name
and type, so two files may declare the same key without importing each other.
"""

from typing import Any, Final, Generic, Literal, TypeVar

T = TypeVar("T")


class Key(Generic[T]):
    """Names a value and its type. Immutable and hashable. Two keys are equal if class, name and type are equal."""

    __slots__ = ("name", "type")

    def __init__(self, name: str, type: type[T]) -> None:
        self.name = name
        self.type = type

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and (self.name, self.type) == (other.name, other.type)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.type.__name__})"


class Column(Key[T]):
    """Names a value that each endpoint has. `candidates[COLUMN]` reads it: a float64 array for numbers, a list for `frozenset` columns.

    `worst` says into which value a stale endpoint's value fades: the highest fresh value ("high", if less is better, as for queue
    lengths) or the lowest fresh value ("low").
    `absent` is the value of an endpoint that was scraped and does not report the column; None means the mean of the fresh values.
    `epp.candidates` has all rules for endpoints without a fresh value.
    """

    __slots__ = ("absent", "worst")

    def __init__(self, name: str, type: type[T], worst: Literal["high", "low"] = "high", absent: float | None = None) -> None:
        super().__init__(name, type)
        self.worst = worst
        self.absent = absent


class Datum(Key[T]):
    """Names a value that each request has. `request[DATUM]` reads and writes it.

    Readers get `default` if the value was not set: the producer failed open, set no value, or is not configured (`optional`).
    All profiles of the request share the value. With `per_profile`, each profile reads and writes its own value.
    """

    __slots__ = ("default", "per_profile")

    def __init__(self, name: str, type: type[T], default: T | None = None, *, per_profile: bool = False) -> None:
        super().__init__(name, type)
        self.default: Any = default
        self.per_profile = per_profile


COUNT_MAX: Final = 2.0**53  # the endpoint table stores the values of a column of type int exactly up to this number

# Values that model servers report. Extractors write them. Plugins declare those that they read.
# Units: requests, except that KV_USAGE is a ratio from 0 to 1, CACHE_BLOCK_SIZE and CACHE_TOKENS are in tokens, CACHE_NUM_BLOCKS in
# blocks, MAX_LORA in adapters. CACHE_BLOCK_SIZE: prefixes are found in multiples of this size. CACHE_TOKENS: how much the KV cache holds.
# CACHE_RANKS: how many data-parallel ranks, each with a KV cache of its own, a server runs behind one address.
WAITING: Final = Column("waiting_requests", int)
RUNNING: Final = Column("running_requests", int)
KV_USAGE: Final = Column("kv_cache_usage", float)
MAX_LORA: Final = Column("max_lora", int, worst="low", absent=0.0)
CACHE_BLOCK_SIZE: Final = Column("cache_block_size", int, worst="low")
CACHE_NUM_BLOCKS: Final = Column("cache_num_blocks", int, worst="low")
CACHE_TOKENS: Final = Column("cache_tokens", int, worst="low")
CACHE_RANKS: Final = Column("cache_ranks", int, absent=1.0)
ACTIVE_MODELS: Column[frozenset[str]] = Column("active_models", frozenset)
WAITING_MODELS: Column[frozenset[str]] = Column("waiting_models", frozenset)
# Averages of a cluster's pool. The pickers of clusters report these averages.
CLUSTER_KV_USAGE: Final = Column("llm-d.ai/multicluster-kv-cache-utilization", float)
CLUSTER_QUEUE: Final = Column("llm-d.ai/multicluster-queue-size", float)
# Load in flight, from the decision to the end of the response. Workers count this load; a read at decision time sums over all workers.
INFLIGHT_REQUESTS: Final = Column("inflight_requests", int)
INFLIGHT_TOKENS: Final = Column("inflight_tokens", int)
SHOWN: Final = (KV_USAGE, RUNNING, WAITING)  # always scraped, even if no plugin reads them: the metrics page shows them
COUNTED: Final = frozenset((INFLIGHT_REQUESTS.name, INFLIGHT_TOKENS.name))
