"""Decides about displacement over all shards: which shards free how much for an arrival at the global limits. Ends no request itself.

Only bands of strictly lower priority give way, the lowest band first. Within a band the shard with the most bytes gives way
first; there the band's displacement policy chooses the items. If all lower bands together are not enough, nothing gives way.
Displacement never helps at the limit of a band: all requests in a band are equally important.
"""

from collections.abc import Iterable
from typing import NamedTuple

from epp.flow.bands import Band
from epp.flow.ports import Peers, Wanted
from epp.request.flows import rank

OWN = -1  # this shard


class Holding(NamedTuple):
    """Says what waits in one band of one shard, minus what is already demanded of that shard."""

    shard: int
    priority: int
    requests: int
    bytes: int


def holdings_of(bands: Iterable[Band], peers: Peers) -> tuple[list[Holding], int, int]:
    """Returns what waits in all shards, and how many requests and bytes other shards have to displace already.

    `bands`: those of this shard.
    """
    holdings, leaving, leaving_bytes = [], 0, 0
    for band in bands:
        holdings.append(Holding(OWN, band.priority, band.requests, band.bytes))
        if not peers.band(band.priority)[0]:
            continue
        for shard in peers.shards():
            held, demanded = peers.held(shard, band.priority), peers.asked(shard, band.priority)
            gone, gone_bytes = min(demanded[0], held.requests), min(demanded[1], held.bytes)
            leaving += gone
            leaving_bytes += gone_bytes
            holdings.append(Holding(shard, band.priority, held.requests - gone, held.bytes - gone_bytes))
    return holdings, leaving, leaving_bytes


def giving_way(priority: int, requests: int, size: int, holdings: Iterable[Holding]) -> list[tuple[int, Wanted]] | None:
    """Returns which shards displace how much for an arrival of `priority`. None: too little can be freed.

    All shards together must free `requests` requests and `size` bytes. Each shard ends waiting requests until it has freed both numbers in
    its `Wanted`. Only the shard itself knows how many requests that takes, because only it knows the size of each.
    """
    lower = [h for h in holdings if rank(h.priority) > rank(priority) and h.requests > 0]
    lower.sort(key=lambda h: (-rank(h.priority), -h.bytes, h.shard))
    parts: list[tuple[int, Wanted]] = []
    for holding in lower:
        if requests <= 0 and size <= 0:
            break
        emptied = 0 < holding.bytes <= size  # freeing all bytes frees all requests
        part = holding.requests if emptied else max(0, min(requests, holding.requests))
        part_size = max(0, min(size, holding.bytes))
        if part or part_size:
            parts.append((holding.shard, Wanted(holding.priority, part, part_size)))
        requests -= part
        size -= part_size
    return parts if requests <= 0 and size <= 0 else None
