"""One world: a seeded scheduler, and the events and disturbances that it chooses."""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple

from epp.decision.decision import Decision, Response, Usage
from epp.flow.outcomes import Outcome
from epp.request.client_headers import TTFT_SLO_MS
from tests.epp.flow.shards import Call, Thing
from tests.epp.flow.simulated_invariants import SWEEP_S, TICK_S, Invariants
from tests.epp.flow.simulated_shards import PRIORITIES, Headed, Request, SimShard, Violation, answered


class Result(NamedTuple):
    """The result of one seed."""

    seed: int
    steps: int
    trace: int  # checksum of all events
    problem: str = ""
    outcomes: tuple[tuple[str, int], ...] = ()


class World(Invariants):
    """The world of one seed: its scheduler and its events."""

    def __init__(self, seed: int, trace: list[str] | None = None) -> None:
        super().__init__(seed, trace)
        self.at(0.0, self.arrivals)
        self.at(self.rng.random() * 0.1, self.disturb)

    def at(self, delay: float, act: Callable[..., None], *arguments: Any) -> None:
        self.sequence += 1
        heappush(self.events, (self.clock.now + delay, self.sequence, act, arguments))

    def run(self) -> Result:
        problem = ""
        try:
            while self.events and self.clock.now < self.stop_at + 5.0:
                self.step()
            self.finish()
        except Violation as violation:
            problem = f"at {self.clock.now - 100.0:.6f} s, step {self.steps}: {violation}"
        except Exception as raised:
            problem = f"at {self.clock.now - 100.0:.6f} s, step {self.steps}: {type(raised).__name__}: {raised}"
        self.broken, self.intrusions = (True, 0.0)  # ignore what follows: callers of dead shards end when they are garbage-collected
        return Result(self.seed, self.steps, self.checksum, problem, tuple(sorted(self.counts.items())))

    def step(self) -> None:
        when, _, act, arguments = heappop(self.events)
        shard = arguments[0] if arguments and isinstance(arguments[0], SimShard) else None
        if shard is not None and (not shard.alive or shard.paused_until > when):
            if shard.alive:  # it acts when it runs again
                self.sequence += 1
                heappush(self.events, (shard.paused_until, self.sequence, act, arguments))
            return
        self.clock.now = max(self.clock.now, when)
        self.steps += 1
        if shard is None:
            act(*arguments)
        else:
            shard.busy = shard.touched = True
            act(*arguments)
            shard.busy = False
        self.check()

    def intrude(self) -> None:
        """Lets another shard act in the middle of a call."""
        if self.intrusions and self.depth < 2 and self.rng.random() < self.intrusions:
            free = [s for s in self.shards if s.alive and not s.busy and s.paused_until <= self.clock.now]
            if free and self.clock.now < self.stop_at:
                shard = self.rng.choice(free)
                self.depth += 1
                shard.busy = shard.touched = True
                self.note("intrusion", shard.number)
                self.rng.choice((self.arrive, self.arrive, self.woken))(shard)
                shard.busy = False
                self.depth -= 1

    def finish(self) -> None:
        """Shuts all shards down: each request must get an answer."""
        for shard in self.shards:
            if not shard.alive:
                continue
            shard.paused_until = 0.0
            shard.busy = True
            shard.controller.shut_down()
            late = Call(shard.controller, Thing())
            shard.arrived += 1
            if late.outcome != "RejectedOther":
                raise Violation(f"an arrival after the shut-down is {late.outcome or 'left waiting'}")
            for request in list(shard.waiting.values()):
                if request.call is not None:
                    request.call.step()
                    self.moved(request)
            shard.busy = False
            if shard.controller.waiting or shard.waiting:
                raise Violation(f"{len(shard.waiting)} requests are left unanswered in shard {shard.number}")
            self.check_contents(shard)
        for request in self.requests:
            if request.state in ("new", "waits"):
                raise Violation(f"request {request.number} never ended")

    # Events.

    def arrivals(self) -> None:
        """Single requests, and sometimes a burst."""
        rng = self.rng
        living = [s for s in self.shards if s.alive]
        for _ in range(rng.choice((1, 1, 1, 3, 8))):
            if living:
                self.at(rng.random() * 0.002, self.arrive, rng.choice(living))
        if self.clock.now < self.stop_at:
            self.at(rng.expovariate(1 / 0.008), self.arrivals)

    def arrive(self, shard: SimShard) -> None:
        rng = self.rng
        item = Headed(
            f"t{int(self.tenants * rng.random() ** 2)}",
            rng.choice(PRIORITIES),
            rng.choice((0, 10, 10, 10, 35)),
            rng.choice((None, None, None, 0.0, 0.02, 9.0)),
            headers=rng.choice(({}, {TTFT_SLO_MS[0]: "20"}, {TTFT_SLO_MS[0]: "500"})),
        )
        item.band = item.priority if item.priority in shard.bands else 0
        request = Request(len(self.requests), item, shard)
        self.requests.append(request)
        self.largest = max(self.largest, item.bytes)
        shard.arrived += 1
        self.note("arrival", shard.number, f"{request.number} {item.fairness_id} {item.priority} {item.bytes}")
        shard.waiting[request.number] = request
        self.accepted.append((self.clock.now, item.priority))
        request.state = "waits"
        shard.shown = None
        displaced = self.counts.get("EvictedDisplaced", 0)
        demanded = any(any(self.board.outstanding(shard.number, priority)) for priority in PRIORITIES)
        request.call = Call(shard.controller, item)
        self.moved(request)
        in_vain = request.call.ended is Outcome.REJECTED_CAPACITY and self.counts.get("EvictedDisplaced", 0) != displaced
        if in_vain and not demanded and not self.intrusions:
            raise Violation("a request was displaced for an arrival that was rejected nevertheless")
        if request.state == "waits":
            self.accepted.append((self.clock.now, item.priority))
            if rng.random() < 0.2:
                self.at(rng.random() * 0.2, self.leave, shard, request)
        self.after_call(shard)

    def moved(self, request: Request) -> None:
        """Updates the state of the request from its call."""
        call = request.call
        assert call is not None
        if request.state == "waits" and call.ended is not None:
            request.shard.waiting.pop(request.number, None)
            if call.ended is Outcome.DISPATCHED:
                request.state = "dispatched"
                self.at(self.rng.choice((0.0, 0.0, 0.003)), self.decide, request.shard, request)
            else:
                request.state = "over"

    def resume(self, shard: SimShard, request: Request) -> None:
        """Runs the callback of a future that was set."""
        if request.state == "waits" and request.call is not None:
            request.call.step()
            self.moved(request)
            self.after_call(shard)

    def leave(self, shard: SimShard, request: Request) -> None:
        """The client leaves: the stream closes the coroutine."""
        if request.state == "waits" and request.call is not None:
            self.note("leaves", shard.number, request.number)
            request.state = "over"
            shard.waiting.pop(request.number, None)
            request.call.leave()
            self.after_call(shard)

    def decide(self, shard: SimShard, request: Request) -> None:
        """Chooses an endpoint, or none."""
        placed = self.rng.random() < 0.95
        self.note("decides", shard.number, f"{request.number} {placed}")
        request.state = "serving" if placed else "over"
        if placed:
            self.pool.inflight[shard.number] += 1
            self.at(self.rng.expovariate(1 / self.mean_service), self.respond, shard, request)
        shard.controller.settled(placed=placed)
        self.after_call(shard)

    def respond(self, shard: SimShard, request: Request) -> None:
        self.note("responds", shard.number, request.number)
        request.state = "over"
        self.pool.inflight[shard.number] -= 1
        response = Response(200)
        response.usage = Usage(request.item.bytes, self.rng.choice((1, 10, 100)), 0)
        for policy in self.learning:
            policy.response_complete(answered(request.item, self.clock.now), Decision((), {}, primary=""), response)
        shard.controller.released()
        self.after_call(shard)

    def wake(self, number: int) -> None:
        shard = self.shards[number]
        if shard.alive and not shard.wake_set:
            shard.wake_set = True
            self.at(self.rng.random() * 0.003, self.woken, shard)

    def woken(self, shard: SimShard) -> None:
        shard.wake_set = False
        shard.controller.woken()
        self.after_call(shard)

    def tick(self, shard: SimShard) -> None:
        shard.tick_set = False
        shard.controller.woken()
        self.after_call(shard)

    def sweep(self, shard: SimShard) -> None:
        shard.sweep_at = min(inf, shard.controller.sweep(self.clock.now))
        if shard.sweep_at < inf:
            shard.sweep_at = max(shard.sweep_at, self.clock.now) + 0.001
            if not shard.controller.waiting and self.clock.now > self.stop_at:
                shard.sweep_at = inf
                return
            self.at(shard.sweep_at - self.clock.now, self.sweep, shard)
        self.after_call(shard)

    def disturb(self) -> None:
        """Injects one disturbance."""
        rng = self.rng
        act = rng.choice((self.churn, self.churn, self.reconfigure, self.stall, self.kill))
        if not self.calm or act in (self.churn, self.reconfigure):
            act()
        if self.clock.now < self.stop_at:
            self.at(rng.expovariate(1 / 0.08), self.disturb)

    def churn(self) -> None:
        self.pool.pods = self.rng.choice((0, 1, 2, 3))
        self.last_pods = self.clock.now
        self.note("pods", self.pool.pods)

    def reconfigure(self) -> None:
        self.provisioned = frozenset(self.rng.sample(PRIORITIES, self.rng.randrange(4)))
        self.note("bands", 0, sorted(self.provisioned))
        for shard in self.shards:
            if shard.alive:
                self.at(self.rng.random() * 0.01, self.provide, shard)

    def provide(self, shard: SimShard) -> None:
        shard.bands = frozenset(self.plan.priorities(self.provisioned))
        shard.controller.provision(self.provisioned)
        self.after_call(shard)

    def stall(self) -> None:
        shard = self.rng.choice(self.shards)
        until = self.clock.now + self.rng.choice((0.005, 0.05, 0.3))
        shard.paused_until = shard.last_pause = max(shard.paused_until, until)
        area = self.board.areas[shard.number]
        area.fresh = self.rng.random() < 0.8
        self.note("stalls", shard.number, f"{shard.paused_until:.6f} {area.fresh}")
        self.at(shard.paused_until - self.clock.now, self.recover, shard)

    def recover(self, shard: SimShard) -> None:
        self.board.areas[shard.number].fresh = True

    def kill(self) -> None:
        shard = self.rng.choice(self.shards)
        if not shard.alive:
            return
        self.note("dies", shard.number)
        shard.alive = False
        self.board.die(shard.number)
        self.pool.inflight[shard.number] = 0
        for request in self.requests:
            if request.shard is shard and request.state != "over":
                request.state = "lost"
        shard.waiting.clear()
        self.last_pods = self.clock.now
        self.at(self.rng.random() * 0.05, self.succeed, shard.number)

    def succeed(self, number: int) -> None:
        self.note("successor", number)
        self.came_at = self.clock.now
        self.board.successor(number)
        self.shards[number] = SimShard(self, number)
        self.shards[number].last_pause = self.clock.now

    def after_call(self, shard: SimShard) -> None:
        """Acts like a worker's loop after an event: sets timers, and schedules the callbacks of futures that were set."""
        for request in shard.waiting.values():
            if request.call is not None and request.call.future is not None and request.call.future.done():
                self.at(self.rng.choice((0.0, 0.001)), self.resume, shard, request)
        if shard.controller.waiting:
            if not shard.tick_set:
                shard.tick_set = True
                self.at(TICK_S, self.tick, shard)
            if shard.sweep_at > self.clock.now + SWEEP_S / 2:
                shard.sweep_at = self.clock.now + self.rng.random() * SWEEP_S / 2
                self.at(shard.sweep_at - self.clock.now, self.sweep, shard)
