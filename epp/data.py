"""Typed keys. The declaration is the accessor: there is no second way to the same value.

`Column` is a value per endpoint that the data layer scrapes (or this process counts); `Datum` is a value per request that a
producer emits. Keys compare by name and type, so two files may declare the same key without importing each other.
"""

from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")


class Key(Generic[T]):
    """A name with a type; hashable, immutable."""

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
    """A value per endpoint. Numbers are read as float64 arrays; `frozenset` columns as lists.

    `worst` says which end of the fresh values a stale endpoint counts as: "high" where less is better (queues), "low" where
    more is better. `absent` is what a server that was scraped and does not report it counts as; None: the mean of the fresh ones.
    """

    __slots__ = ("absent", "worst")

    def __init__(
        self, name: str, type: type[T], worst: Literal["high", "low"] = "high", absent: float | None = None
    ) -> None:
        super().__init__(name, type)
        self.worst = worst
        self.absent = absent


class Datum(Key[T]):
    """A value per request. `default` is what consumers see when the producer failed open, or had nothing to say.

    It is shared over the request's profiles unless `per_profile`: then each profile reads and writes its own.
    """

    __slots__ = ("default", "per_profile")

    def __init__(self, name: str, type: type[T], default: T | None = None, *, per_profile: bool = False) -> None:
        super().__init__(name, type)
        self.default: Any = default
        self.per_profile = per_profile


# What model servers report, by the names of the design; extractors produce them, plugins declare those that they read.
WAITING = Column("waiting_requests", int)
RUNNING = Column("running_requests", int)
KV_USAGE = Column("kv_cache_usage", float)
MAX_LORA = Column("max_lora", int, worst="low", absent=0.0)
CACHE_BLOCK_SIZE = Column("cache_block_size", int, worst="low")
CACHE_NUM_BLOCKS = Column("cache_num_blocks", int, worst="low")
ACTIVE_MODELS: Column[frozenset[str]] = Column("active_models", frozenset)
WAITING_MODELS: Column[frozenset[str]] = Column("waiting_models", frozenset)
# What the workers count themselves, at decision time, over all of them.
INFLIGHT_REQUESTS = Column("inflight_requests", int)
INFLIGHT_TOKENS = Column("inflight_tokens", int)
SHOWN = (KV_USAGE, RUNNING, WAITING)  # scraped whatever plugins read: the metrics page has them
COUNTED = frozenset((INFLIGHT_REQUESTS.name, INFLIGHT_TOKENS.name))
