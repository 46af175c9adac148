"""Who gives way, over all shards, to an arrival that finds the global limits reached: a pure choice, made before anybody is evicted.

Strictly lower priorities only, the lowest band first; of a band the shard that holds the most bytes of it first, where the
band's displacement policy then names the items. If everything lower is not enough, nobody gives way.
A band's own limit is never helped by this: nothing in a band is less important than another of it.
"""

from collections.abc import Iterable
from typing import NamedTuple

from epp.flow.ports import Wanted
from epp.flows import rank

OWN = -1  # this shard


class Holding(NamedTuple):
    """What waits in one band of one shard, less what it has been asked to displace already."""

    shard: int
    priority: int
    requests: int
    bytes: int


def giving_way(priority: int, requests: int, size: int, holdings: Iterable[Holding]) -> list[tuple[int, Wanted]] | None:
    """Which shards displace how much for an arrival of `priority` that needs so many places and bytes; None: it cannot be freed.

    A shard frees until both figures of its part are reached: what an item weighs is known there alone.
    """
    lower = [h for h in holdings if rank(h.priority) > rank(priority) and h.requests > 0]
    lower.sort(key=lambda h: (-rank(h.priority), -h.bytes, h.shard))
    parts: list[tuple[int, Wanted]] = []
    for holding in lower:
        if requests <= 0 and size <= 0:
            break
        emptied = 0 < holding.bytes <= size  # with all its bytes all its requests go
        part = holding.requests if emptied else max(0, min(requests, holding.requests))
        part_size = max(0, min(size, holding.bytes))
        if part or part_size:
            parts.append((holding.shard, Wanted(holding.priority, part, part_size)))
        requests -= part
        size -= part_size
    return parts if requests <= 0 and size <= 0 else None
