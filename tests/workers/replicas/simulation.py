"""Replicas in virtual time, whose messages are lost, delayed, repeated and reordered.

To run it: `python -m tests.workers.replicas.simulation`.

Each world has two to four replicas with random load over a few endpoints. During the first part messages suffer, replicas pause, are
killed and start again under their old name. Then the network heals. After one whole message and the time after which silent replicas
fade, every replica must see exactly what the living others have. At every moment no sum may be negative or above what could be.
"""

import argparse
import heapq
import random

from tests.workers.replicas.messages import message
from workers.replicas.others import FADE_S, Others

ENDPOINTS = 4
TICK_S = 0.05
WHOLE_S = 1.0
STORM_S = 4.0
HEALED_S = WHOLE_S + FADE_S + 0.2
LOAD_MAX = 50


class Replica:
    """One replica: its true load, and what it knows of the others."""

    def __init__(self, name: str, epoch: int) -> None:
        self.name, self.epoch = name, epoch
        self.sequence = 0
        self.loads = dict.fromkeys(range(ENDPOINTS), (0, 0))
        self.said: dict[int, tuple[int, int]] = {}
        self.whole_at = float("-inf")
        self.paused_until = 0.0
        self.others = Others(name, (epoch, 1), 8)

    def message(self, now: float) -> bytes:
        whole = now - self.whole_at >= WHOLE_S
        loads = self.loads if whole else {k: v for k, v in self.loads.items() if self.said.get(k) != v}
        if whole:
            self.whole_at = now
            loads = {key: load for key, load in loads.items() if load != (0, 0)}
        self.said = dict(self.loads)
        self.sequence += 1
        return message(self.name, self.sequence, loads, whole=whole, epoch=self.epoch, origin=1)


class World:
    """A random world. `run` raises AssertionError if a rule is broken."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.epochs = 0
        self.now = 0.0
        self.replicas = [self._start(f"r{number}") for number in range(self.rng.randint(2, 4))]
        self.loss, self.twice, self.delay = self.rng.random() * 0.6, self.rng.random() * 0.4, self.rng.random() * 1.5
        self.queue: list[tuple[float, int, int, bytes]] = []  # time, order, number of the receiver, message
        self.order = 0

    def run(self) -> None:
        while self.now < STORM_S + HEALED_S:
            self.now += TICK_S
            storm = self.now < STORM_S
            if storm:
                self._trouble()
            self._deliver()
            for number, replica in enumerate(self.replicas):
                if self.now < replica.paused_until and storm:
                    continue
                replica.others.expire(self.now)
                self._send(number, replica.message(self.now), storm=storm)
            self._check()
        self._converged()

    def _start(self, name: str) -> Replica:
        self.epochs += 1
        return Replica(name, self.epochs)

    def _trouble(self) -> None:
        rng = self.rng
        for replica in self.replicas:
            key = rng.randrange(ENDPOINTS)
            replica.loads[key] = (rng.randint(0, LOAD_MAX), rng.randint(0, LOAD_MAX)) if rng.random() < 0.7 else (0, 0)
        if rng.random() < 0.02:
            rng.choice(self.replicas).paused_until = self.now + rng.random() * 3
        if rng.random() < 0.02:
            number = rng.randrange(len(self.replicas))
            self.replicas[number] = self._start(self.replicas[number].name)

    def _send(self, sender: int, data: bytes, *, storm: bool) -> None:
        rng = self.rng
        for receiver in range(len(self.replicas)):
            copies = 1 if not storm else 0 if rng.random() < self.loss else 2 if rng.random() < self.twice else 1
            for _ in range(copies):
                self.order += 1
                delay = rng.random() * self.delay if storm else 0.001
                heapq.heappush(self.queue, (self.now + delay, self.order, receiver, data))

    def _deliver(self) -> None:
        while self.queue and self.queue[0][0] <= self.now:
            at, _, receiver, data = heapq.heappop(self.queue)
            replica = self.replicas[receiver]
            if at >= replica.paused_until or at >= STORM_S:
                replica.others.receive(data, self.now)

    def _check(self) -> None:
        most = LOAD_MAX * (len(self.replicas) - 1)
        for replica in self.replicas:
            for requests, tokens in replica.others.totals.values():
                assert 0 <= requests <= most
                assert 0 <= tokens <= most

    def _converged(self) -> None:
        for replica in self.replicas:
            sums = {}
            for key in range(ENDPOINTS):
                loads = [other.loads[key] for other in self.replicas if other is not replica]
                total = sum(load[0] for load in loads), sum(load[1] for load in loads)
                if total != (0, 0):
                    sums[key] = total
            assert replica.others.totals == sums, (replica.name, replica.others.totals, sums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    for seed in range(options.first, options.first + options.seeds):
        try:
            World(seed).run()
        except AssertionError as broken:
            raise SystemExit(f"seed {seed}: {broken}") from broken
    print(f"{options.seeds} worlds: sums converge, none is negative or too high")


if __name__ == "__main__":
    main()
