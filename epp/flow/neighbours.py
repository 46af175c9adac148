"""Order among shards: who goes first when there is room for one request and several workers hold some that wait.

Room is global, so whoever looks first could take it. Before a shard serves a request it looks at the others' fronts (most important
band, claim): where a more important band waits, or the same band with a claim that is smaller by more than the band's tolerance, it
wakes that shard and leaves the room to it. What a claim counts is the band's matter (`Band.claim`): seconds of waiting, or a position
among flows. Bounded both ways: a shard that lets nothing through for `PATIENCE_S` after it was waked is *stuck* and does not count
until it moves again; one that meanwhile leaves the room to yet another, of which it has still to find that it is stuck, has
`YIELDING_S`. So room is never left unused for long, and one that holds something important is passed over by that long at most. A wake
without an answer is not repeated before `REPEAT_S`.
"""

from epp.flow.ports import Front, Peers
from epp.flows import rank

PATIENCE_S = 0.010
YIELDING_S = 0.025  # the same for itself, and three of its looks, which are 5 ms apart
REPEAT_S = 0.005
FORGOTTEN_S = 0.020  # who was not in the way for so long is met with new patience


class _Met:
    """What is known of one shard since room was left to it."""

    __slots__ = ("progress", "seen", "since", "waked", "yields")

    def __init__(self, progress: int, yields: int, now: float) -> None:
        self.progress = progress
        self.yields = yields
        self.since = self.seen = now
        self.waked = float("-inf")


class Neighbours:
    """The other shards, as one that wants to serve meets them."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._met: dict[int, _Met] = {}

    def ahead(self, priority: int, claim: float, tolerance: float, now: float) -> bool:
        """Whether another shard goes first; it has been waked then."""
        own, clearly = rank(priority), claim - tolerance
        first = [f for f in self._peers.fronts() if (rank(f.priority), f.claim) < (own, clearly)]
        for front in sorted(first, key=lambda f: (rank(f.priority), f.claim)):
            if not self._stuck(front.shard, now):
                self._wake(front.shard, now)
                self._peers.yielded()
                return True
        return False

    def invite(self, now: float) -> None:
        """There is room that this shard does not need: the one with the best claim is waked."""
        fronts = self._peers.fronts()
        if fronts:
            best: Front = min(fronts, key=lambda f: (rank(f.priority), f.claim))
            self._meet(best.shard, now)
            self._wake(best.shard, now)

    def no_room(self) -> None:
        """Nobody can go: who did not move had no room either, and gets new patience."""
        self._met.clear()

    def _meet(self, shard: int, now: float) -> _Met:
        progress = self._peers.progress(shard)
        met = self._met.get(shard)
        if met is None or met.progress != progress or now - met.seen > FORGOTTEN_S:
            met = self._met[shard] = _Met(progress, self._peers.yields(shard), now)
        met.seen = now
        return met

    def _stuck(self, shard: int, now: float) -> bool:
        met = self._meet(shard, now)
        lasted = now - met.since
        return lasted >= PATIENCE_S and (lasted >= YIELDING_S or self._peers.yields(shard) == met.yields)

    def _wake(self, shard: int, now: float) -> None:
        met = self._met[shard]
        if now - met.waked >= REPEAT_S:
            met.waked = now
            self._peers.wake(shard)
