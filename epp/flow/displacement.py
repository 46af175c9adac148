"""Decides about displacement over all shards: if an arrival exceeds the global limits, which shards free how much room. The module itself
ends no request.

Only bands of strictly lower priority give way, the lowest band first. Within a band the shard with the most bytes gives way
first. In a shard, the band's displacement policy chooses the items. If all lower bands together are not enough, no item gives way.
Displacement never helps at the limit of a band: all requests in a band are equally important.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from epp.flow.bands import Band
from epp.flow.plan import FlowPlan
from epp.flow.ports import Peers, Wanted
from epp.request.flows import rank

OWN = -1  # this shard
Demands = Sequence[tuple[int, Wanted]]  # which shard displaces how much


class Holding(NamedTuple):
    """Says what waits in one band of one shard, minus what is already demanded of that shard."""

    shard: int
    priority: int
    requests: int
    bytes: int


def holdings_of(bands: Iterable[Band], peers: Peers) -> tuple[list[Holding], int, int]:
    """Returns what waits in all shards. Also returns how many requests and bytes other shards have still to displace.

    `bands`: the bands of this shard.
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


def giving_way(priority: int, requests: int, size: int, holdings: Iterable[Holding]) -> Demands | None:
    """Returns which shards displace how much for an arrival of `priority`, or None if too little can be freed.

    All shards together must free `requests` requests and `size` bytes. Each shard ends waiting requests until it has freed both numbers in
    its `Wanted`. Only the shard itself knows how many requests that takes, because only the shard knows the size of each request.
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


class Limits:
    """The limits over all bands of all shards."""

    def __init__(self, plan: FlowPlan, peers: Peers) -> None:
        self._max_requests = plan.max_requests  # 0: no limit
        self._max_bytes = plan.max_bytes
        self._peers = peers

    def exceeded(self, requests: int, size: int) -> bool:
        """Returns whether the limits are exceeded if this many requests and bytes wait in this shard."""
        if not self._max_requests and not self._max_bytes:
            return False
        peer_requests, peer_bytes = self._peers.totals()
        return 0 < self._max_requests < peer_requests + requests or 0 < self._max_bytes < peer_bytes + size

    def giving_way(self, priority: int, size: int, bands: Iterable[Band], waiting: int, waiting_bytes: int) -> Demands | None:
        """Returns what each shard would displace for one request of `size` bytes and this priority, or None if too little can be freed.

        `bands`, `waiting`, `waiting_bytes`: what waits in this shard.
        """
        holdings, leaving, leaving_bytes = holdings_of(bands, self._peers)
        peer_requests, peer_bytes = self._peers.totals()
        total = peer_requests + waiting - leaving + 1
        total_bytes = peer_bytes + waiting_bytes - leaving_bytes + size
        return giving_way(
            priority,
            total - self._max_requests if self._max_requests else 0,
            total_bytes - self._max_bytes if self._max_bytes else 0,
            holdings,
        )
