"""Decides which shard goes first when there is room for one request and requests wait in several workers.

All workers share the room, so without an order the first shard that looks would take all of it. Before a shard serves a request, it looks
at the heads of the other shards (most important band, claim). Another shard goes first if its band is more important. In the same band,
another shard goes first if its claim is smaller by more than the band's tolerance. The shard that looks then wakes the other one and leaves
the room to it. A claim is a time in seconds, or a position in the unit of the band's fairness policy (`Band.claim`).

Room must not stay unused. So a shard that lets nothing through for `PATIENCE_S` after it was woken is *stuck*, and is ignored until it
lets a request through. If such a shard leaves room to a third shard meanwhile, it is stuck only after `YIELDING_S`. A shard that lets
nothing through after a wake is woken again after `REPEAT_S`.

Other replicas of the picker go first only if they have a more important waiting band; claims cannot be compared. Replicas cannot be woken,
and what they do becomes known later. So replicas are stuck if they let no request through for `ELSEWHERE_S`, until they let one through. At
first they stay stuck for at most `ELSEWHERE_REST_S`, and then they get another `ELSEWHERE_S`. Each further such period is twice as long, up
to a limit.
"""

from collections.abc import Sequence

from epp.flow.bands import Band
from epp.flow.ports import Elsewhere, Head, Peers
from epp.request.flows import rank

PATIENCE_S = 0.010
# The other shard may itself give PATIENCE_S to a third one. Three looks, 5 ms apart, are added.
YIELDING_S = 0.025
REPEAT_S = 0.005
ELSEWHERE_S = 0.050
ELSEWHERE_REST_S, ELSEWHERE_REST_S_MAX = 0.100, 1.6
FORGOTTEN_S = 0.020  # if another shard was not ahead of this one for this long, it gets its full PATIENCE_S again


class _Watched:
    """Remembers what this shard knows of another shard since it left room to that shard."""

    __slots__ = ("progress", "seen", "since", "woken_at", "yields")

    def __init__(self, progress: int, yields: int, now: float) -> None:
        self.progress = progress
        self.yields = yields
        self.since = self.seen = now
        self.woken_at = float("-inf")


class ShardOrder:
    """Decides whether this shard or another one goes first, and shows other shards what waits in this one."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.head_moved = False  # whether what `show_head` shows may have changed since
        self._watched: dict[int, _Watched] = {}
        self._elsewhere: Elsewhere | None = None  # what waited in other replicas when this shard left room to them first
        self._elsewhere_since = 0.0
        self._elsewhere_rest_s = ELSEWHERE_REST_S
        self._elsewhere_stuck = False

    def ahead(self, priority: int, claim: float, tolerance: float, now: float) -> bool:
        """Returns whether another shard goes first. If so, wakes that shard. Another replica cannot be woken."""
        own, clearly = rank(priority), claim - tolerance
        first = [f for f in self._peers.heads() if (rank(f.priority), f.claim) < (own, clearly)]
        for head in sorted(first, key=lambda f: (rank(f.priority), f.claim)):
            if not self._stuck(head.shard, now):
                self._wake(head.shard, now)
                self._peers.yielded()
                return True
        if self._elsewhere_ahead(own, now):
            self._peers.yielded()
            return True
        return False

    def invite(self, now: float) -> None:
        """Wakes the shard with the best claim. Call it when there is room that this shard does not need."""
        heads = self._peers.heads()
        if heads:
            best: Head = min(heads, key=lambda f: (rank(f.priority), f.claim))
            self._look_at(best.shard, now)
            self._wake(best.shard, now)

    def no_room(self) -> None:
        """Notes that the pool has no room. No shard can let requests through then, so all of them get their full PATIENCE_S again."""
        self._watched.clear()
        if not self._elsewhere_stuck:
            self._elsewhere = None

    def show_head(self, bands: Sequence[Band], now: float) -> None:
        """Publishes this shard's head: its most important waiting band and that band's claim. Does nothing while there is only one shard.

        The claim also changes when other shards dispatch requests of the same flows. A shard that leaves room to another one publishes its
        head again, so that no two shards wait for each other. In other cases an outdated claim costs at most one needless wake.

        `bands`: the bands of this shard, the most important first.
        """
        if not self.head_moved:
            return
        for band in bands:
            if not band.requests:
                continue
            if not self._peers.shards():
                return
            if (flow := band.pick(now)) is not None:
                self._peers.head(band.priority, band.claim(flow))
                self.head_moved = False
                return
        self._peers.head(None, 0.0)
        self.head_moved = False

    def _elsewhere_ahead(self, own: int, now: float) -> bool:
        other = self._peers.elsewhere()
        if other is None or rank(other.priority) >= own:
            return False
        if other != self._elsewhere:
            self._elsewhere, self._elsewhere_since, self._elsewhere_rest_s = other, now, ELSEWHERE_REST_S
        elif now - self._elsewhere_since >= ELSEWHERE_S + self._elsewhere_rest_s:
            self._elsewhere_since = now
            self._elsewhere_rest_s = min(2 * self._elsewhere_rest_s, ELSEWHERE_REST_S_MAX)
        self._elsewhere_stuck = now - self._elsewhere_since >= ELSEWHERE_S
        return not self._elsewhere_stuck

    def _look_at(self, shard: int, now: float) -> _Watched:
        progress = self._peers.progress(shard)
        other = self._watched.get(shard)
        if other is None or other.progress != progress or now - other.seen > FORGOTTEN_S:
            other = self._watched[shard] = _Watched(progress, self._peers.yields(shard), now)
        other.seen = now
        return other

    def _stuck(self, shard: int, now: float) -> bool:
        other = self._look_at(shard, now)
        lasted = now - other.since
        return lasted >= PATIENCE_S and (lasted >= YIELDING_S or self._peers.yields(shard) == other.yields)

    def _wake(self, shard: int, now: float) -> None:
        other = self._watched[shard]
        if now - other.woken_at >= REPEAT_S:
            other.woken_at = now
            self._peers.wake(shard)
