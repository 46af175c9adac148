"""The invariants of flow control, checked after each step of a simulated world."""

from math import inf
from operator import itemgetter

from epp.flow.bands import Band, Flow
from epp.flow.gate import KEPT_FAR_S
from epp.flow.ports import Held
from epp.request.flows import FlowKey
from tests.epp.flow.simulated_shards import PRIORITIES, ClaimedBand, SimShard, Violation
from tests.epp.flow.simulated_state import State

TICK_S = 0.005
SWEEP_S = 0.100  # how late a sweep may be
OUTRANKED_S = 0.100  # how long a request may wait elsewhere while less important ones are dispatched here
IDLE_ROOM_S = 0.060  # how long room may stay unused while something waits
ANSWER_S = 0.010


class Invariants(State):
    """What must hold after each step. Each check raises `Violation`."""

    def check(self) -> None:
        """Checks the shards that acted, and at every 16th step all shards: time alone can break an invariant, too."""
        everything = self.steps % 16 == 0
        for shard in self.shards:
            if shard.alive and (shard.touched or everything):
                shard.touched = False
                self.check_contents(shard)
        if self.queue_moved or everything:
            self.queue_moved = False
            self.check_limits()
        for shard in self.shards:
            head = self.board.areas[shard.number].head
            if head != shard.head:
                shard.head, shard.head_since = head, self.clock.now
        self.check_answers()
        self.check_room()

    def check_contents(self, shard: SimShard) -> None:
        """The counters of a shard equal what it holds and what it shows, and each of its requests has a caller."""
        controller = shard.controller
        requests = size = 0
        for band in controller._registry.order:
            in_band, bytes_in_band = self.check_band(shard, band)
            requests += in_band
            size += bytes_in_band
        if (controller.waiting, controller.waiting_bytes) != (requests, size):
            raise Violation(f"shard {shard.number} counts {controller.waiting} waiting, and holds {requests}")
        if sum(n for n, _ in shard.flows.values()) != requests:
            raise Violation(f"the flows of shard {shard.number} show {shard.flows}, and {requests} wait")
        found = sum(1 for r in shard.waiting.values() if r.call is not None and not r.call.ready)
        if found != requests:
            raise Violation(f"{found} callers wait in shard {shard.number}, and {requests} items")
        if shard.arrived != shard.ended_count + requests:
            raise Violation(f"{shard.arrived} arrived in shard {shard.number}, {shard.ended_count} ended, {requests} wait")
        self.check_area(shard, requests)

    def check_band(self, shard: SimShard, band: Band) -> tuple[int, int]:
        """Returns the requests and bytes that wait in a band of a shard."""
        in_band = bytes_in_band = 0
        for flow in band.active.values():
            items = list(flow.scan())
            total = sum(item.bytes for item in items)
            if not items or len(flow) != len(items) or flow.bytes != total or flow.leases != len(items):
                raise Violation(f"flow {flow.key} counts {len(flow)} items, {flow.leases} leases, {flow.bytes} bytes; it holds {items}")
            if shard.flows.get(flow.key) != (len(items), total):
                raise Violation(f"flow {flow.key} shows {shard.flows.get(flow.key)}, and holds {len(items)}, {total}")
            in_band += len(items)
            bytes_in_band += total
            self.check_items(shard, band, flow)
        held = self.board.areas[shard.number].bands.get(band.priority, Held())
        if not (band.requests == in_band == held.requests and band.bytes == bytes_in_band == held.bytes):
            raise Violation(f"band {band.priority} of shard {shard.number} counts {band.requests}, holds {in_band}, shows {held}")
        if band.leaving and not in_band:
            raise Violation(f"band {band.priority} is leaving and empty, and still exists")
        if held.oldest != min((e.arrival for e in band.entries()), default=0.0):
            raise Violation(f"band {band.priority} shows the wrong oldest arrival")
        return in_band, bytes_in_band

    def check_items(self, shard: SimShard, band: Band, flow: Flow) -> None:
        """Each item of a flow waits, in its band, and no longer than its TTL."""
        now, deadlines = self.clock.now, shard.controller._deadlines
        late = SWEEP_S + 0.002 if shard.last_pause < now - SWEEP_S else inf
        for item in flow.scan():
            if item.outcome is not None or not item.waits:  # type: ignore[attr-defined]
                raise Violation(f"flow {flow.key} holds a request that has ended")
            if item.request.band != band.priority:  # type: ignore[attr-defined]
                raise Violation(f"a request of priority {item.flow.priority} waits in band {band.priority}")
            if late < inf and now > deadlines.end(item) + late:  # type: ignore[arg-type]
                raise Violation(f"a request of {flow.key} waits since {item.arrival - 100}, longer than its TTL")

    def check_area(self, shard: SimShard, requests: int) -> None:
        """What a shard shows of pending requests and of its head agrees with the requests that wait in it."""
        area = self.board.areas[shard.number]
        if self.steps % 16 == 0:
            pending = sum(1 for r in self.requests if r.shard is shard and r.state == "dispatched")
            undelivered = sum(1 for r in shard.waiting.values() if r.call is not None and r.call.ready)
            if not 0 <= area.pending - pending <= undelivered:
                raise Violation(f"shard {shard.number} shows {area.pending} pending, of which {pending} are and {undelivered} may be")
        settled = (
            max(self.came_at, shard.last_pause) < self.clock.now - 2 * TICK_S and shard.controller._peers.shards()
        )  # a shard without peers shows none
        if settled and (area.head is None) != (not requests):
            raise Violation(f"shard {shard.number} shows the head {area.head}, and {requests} wait")

    def demanded(self) -> tuple[int, int]:
        areas = self.board.areas
        demands = [self.board.outstanding(i, p) for i, p in self.board.asked if areas[i].serving]
        return sum(requests for requests, _ in demands), sum(size for _, size in demands)

    def check_limits(self) -> None:
        serving = [area for area in self.board.areas if area.serving]
        demanded, demanded_bytes = self.demanded()
        slack = len(serving) - 1 if self.intrusions else 0
        for what, limit, total, more in (
            ("requests", self.plan.max_requests, sum(h.requests for x in serving for h in x.bands.values()), demanded + slack),
            ("bytes", self.plan.max_bytes, sum(h.bytes for x in serving for h in x.bands.values()), demanded_bytes + slack * 35),
        ):  # fmt: skip
            if limit and total > limit + more:
                raise Violation(f"{total} {what} wait, the limit is {limit}; {demanded} requests and {demanded_bytes} bytes are demanded")
        for priority in PRIORITIES:
            plan = self.band_plans[priority]
            held = [area.bands.get(priority, Held()) for area in serving]
            if sum(h.requests for h in held) > plan.max_requests + slack:
                raise Violation(f"{held} wait in band {priority}, the limit is {plan.max_requests}")
            if sum(h.bytes for h in held) > plan.max_bytes + slack * 35:
                raise Violation(f"{held} wait in band {priority}, the limit is {plan.max_bytes} bytes")

    def check_answers(self) -> None:
        for shard in self.shards if self.board.asked else ():
            outstanding = shard.alive and any(any(self.board.outstanding(i, p)) for i, p in self.board.asked if i == shard.number)
            if not outstanding:
                shard.demanded_since = None
            elif shard.demanded_since is None:
                shard.demanded_since = self.clock.now
            elif self.clock.now - max(shard.demanded_since, shard.last_pause) > ANSWER_S:
                raise Violation(f"shard {shard.number} has not answered a demand of {self.clock.now - shard.demanded_since} s ago")

    def room_for(self, priority: int, shard: SimShard) -> bool:
        """Whether the band has room, by the exact load and by the bands that the shard knows. The ceilings depend on both."""
        load = self.pool.load()
        capacity = self.pool.pods * self.pool.each
        if load.empty or (self.pool.pending() and not load.step):
            return False
        used = round(load.saturation + self.pool.pending() / capacity, 9)
        return used < self.ceiling(priority, shard, load.saturation)

    def ceiling(self, priority: int, shard: SimShard, saturation: float) -> float:
        """The ceiling of a band, by the bands that the shard knows."""
        priorities = sorted((b.priority for b in shard.controller._registry.order), reverse=True)
        ceilings = dict(zip(priorities, self.plan.usage_limits.ceilings(saturation, priorities), strict=True))
        return round(ceilings.get(priority, 0.0), 9)

    def check_room(self) -> None:
        """Work conserving: room does not stay unused while a request waits for it."""
        now = self.clock.now
        tops = []
        for shard in self.shards:
            if shard.alive and shard.controller.waiting and shard.last_pause < now - IDLE_ROOM_S:
                tops.append((next(b.priority for b in shard.controller._registry.order if b.requests), shard))
        if not tops or not self.room_for(*max(tops, key=itemgetter(0))):
            self.room_since = None
        elif self.room_since is None or self.last_dispatch > self.room_since:
            self.room_since = now
        elif now - self.room_since > IDLE_ROOM_S:
            raise Violation(f"there is room since {self.room_since - 100.0:.6f}, and bands {[p for p, _ in tops]} wait")

    def check_dispatch(self, shard: SimShard, key: FlowKey, own: int) -> None:
        """Checks order and gate at the moment of a dispatch."""
        now = self.clock.now
        self.last_dispatch = now
        for band in shard.controller._registry.order:
            if band.priority > own and band.requests:
                raise Violation(f"{key} is dispatched, and {band.requests} of band {band.priority} wait in the same shard")
        for other in self.shards:
            area = self.board.areas[other.number]
            if other is shard or not (area.serving and area.fresh) or other.last_pause > now - OUTRANKED_S - 0.01:
                continue
            for priority, held in area.bands.items():
                if priority > own and held.requests and now - held.oldest > OUTRANKED_S and not other.busy:
                    raise Violation(
                        f"{key} is dispatched, and band {priority} waits in shard {other.number} since {held.oldest - 100.0:.6f}"
                    )
            self.check_claim(shard, key, own, other)
        capacity = self.pool.pods * self.pool.each
        load = self.pool.total() + self.pool.pending()  # with this one
        slack = len(self.shards) - 1 if self.intrusions else 0
        if self.last_pods < now - KEPT_FAR_S - 0.0001 and load > capacity + slack:
            raise Violation(f"{load} are in flight or pending, and {capacity} fit")

    def check_claim(self, shard: SimShard, key: FlowKey, own: int, other: SimShard) -> None:
        """An earlier claim of the same band in another shard has not been shown for long."""
        area, now = self.board.areas[other.number], self.clock.now
        if self.faulty or other.busy or area.head is None or area.head != other.head or area.head[0] != own:
            return
        saturation = self.pool.load().saturation
        if self.ceiling(own, other, saturation) < self.ceiling(own, shard, saturation):
            return  # the other shard knows other bands, so it may see no room where this one does
        band = shard.controller._registry.find(own)
        if band is None:
            return  # it left with its last request
        assert isinstance(band, ClaimedBand)
        claim, other_claim = band.served_claim, area.head[1]
        tolerance = self.band_plans[own].fairness.tolerance
        if other_claim < claim - tolerance and now - other.head_since > OUTRANKED_S:
            raise Violation(f"{key} is dispatched at claim {claim}, and {other_claim} of its band waits in shard {other.number}")

    def check_displaced(self, shard: SimShard, key: FlowKey, own: int) -> None:
        horizon = self.clock.now - 0.05
        if shard.last_pause > horizon - 0.2:
            horizon = -inf
        if not any(when >= horizon and self.as_band(priority) > own for when, priority in self.accepted):
            raise Violation(f"{key} was displaced, and nothing more important has arrived")

    def as_band(self, priority: int) -> int:
        return max(priority, 0)  # a priority without a band counts as 0, which is more for a negative one
