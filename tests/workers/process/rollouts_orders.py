"""Drives the `Rollouts` of several pools with events in random orders, and asserts what must always hold: for each what `rollout_orders`
asserts of one, and that none influences another.

    python -m tests.workers.process.rollouts_orders 20000

- An event about one pool causes actions for this pool alone.
- A pool about which nothing happens stays as it is, whatever happens to the others.
- There is one trial child at a time.
- Each reload of all pools gets one answer, which has the result of each pool.
"""

import random
import sys
from collections.abc import Callable

from tests.workers.process.rollout_orders import ORDINALS, QUIET_TURNS, TEXTS, World, play
from workers.process.rollout import SPREAD_S, TRIAL_S, WATCH_S, Event, Idle, Rollout, TrialEnded, Trying
from workers.process.rollouts import GONE, UNCHANGED, Answered, Rollouts, Told

POOLS = 4
BYSTANDER = POOLS - 1  # a pool about which nothing happens
LIST = POOLS
STEPS = 80


class Pool(World):
    """One pool of many, or their list."""

    def __init__(self, many: "Many", key: int, rollout: Rollout) -> None:
        self.many, self.key = many, key
        super().__init__(many.rng)
        self.rollout = rollout
        if not rollout.number:  # it comes later
            self.slots, self.texts, self.used, self.highest = {}, {}, [(0, 0)] * ORDINALS, rollout.highest
            self.in_force = type(self.in_force)()

    @property
    def now(self) -> float:
        return self.many.now

    @now.setter
    def now(self, now: float) -> None:
        """All have the time of `many`."""

    def tell(self, event: Event) -> None:
        self.many.carry_out(self.many.rollouts.on(self.key, event, self.now), self.key)

    def turn(self, seconds: float = 0.1) -> None:
        self.many.turn(seconds)

    def changes(self, text: str) -> None:
        self.ask("", text)

    def settle(self) -> None:
        self.many.settle()

    def asked_to_reload(self) -> None:
        """A reload of all pools asks for one of this pool."""
        self.asked += not self.reload_waits
        self.reload_waits = True


class Many:
    """Several pools and their list."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 100.0
        self.rollouts = Rollouts(LIST)
        self.pools: dict[int, Pool] = {}
        for key in range(POOLS + 1):
            self._add(key, Rollout(1, TEXTS[0]))
        self.asked = 0  # reloads of all pools
        self.answers: list[Answered] = []
        self.dropped = False

    def _add(self, key: int, rollout: Rollout) -> None:
        self.rollouts.add(key, rollout)
        self.pools[key] = Pool(self, key, rollout)

    def carry_out(self, told: list[Told], about: int | None) -> None:
        """`about`: the key of the only configuration that may be concerned; None: any one."""
        for key in dict.fromkeys(key for key, _ in told):
            assert about in (key, None), "a pool influences another one"
            self.pools[key].told([action for each, action in told if each == key])
        assert sum(pool.trial is not None and not pool.killed for pool in self.pools.values()) <= 1, "two trials at a time"
        self.answers += self.rollouts.answers
        self.rollouts.answers.clear()

    def turn(self, seconds: float = 0.1) -> None:
        self.now += seconds
        self.carry_out(self.rollouts.tick(self.now, lambda key: self.pools[key].behind()), None)
        if self.rollouts.due and self.rollouts.round is not None:
            for key in self.rollouts.round.wanted:
                if key in self.pools:
                    self.pools[key].asked_to_reload()
            self.carry_out(self.rollouts.reload_changed(self.now), None)

    def reload_all(self, text: str) -> None:
        """An operator reloads all pools, or a command of the list waits already."""
        pool = self.pools[LIST]
        self.asked += not pool.reload_waits
        pool.ask("", text)

    def list_tried(self, *, good: bool = True) -> None:
        """The parent reaps the trial child of the list, which tells what has changed."""
        pool = self.pools[LIST]
        known = [key for key in self.pools if key != LIST]
        changed = self.rng.sample([key for key in known if key != BYSTANDER], self.rng.randrange(len(known)))
        good = good and bool(pool.written)
        if good and isinstance(pool.rollout.state, Trying):
            self.rollouts.follow(changed, set(known) - set(changed))
        pool.trial = None
        pool.tell(TrialEnded(pool.written if good else None, "", unchanged=self.rng.random() < 0.5))

    def drops(self, key: int) -> None:
        """A pool goes, whatever it does. Another one comes into its place."""
        highest = self.pools[key].rollout.highest
        self.rollouts.drop(key)
        self.carry_out([], None)
        self._add(key, Rollout(highest, None))

    def step(self) -> None:
        rng, key = self.rng, self.rng.randrange(POOLS - 1)
        pool, text = self.pools[key], rng.choice(TEXTS)
        events: list[tuple[int, Callable[[], None]]] = [
            (20, pool.step),
            (4, lambda: self.turn(rng.choice([0.05, 0.5]))),
            (1, lambda: self.turn(rng.choice([WATCH_S, TRIAL_S, SPREAD_S]))),
            (2, lambda: self.reload_all(text)),
            (2, lambda: self.carry_out(self.rollouts.crashed("child", self.now, key), key)),
            (1, lambda: self.drops(key)),
        ]
        if self.pools[LIST].trial is not None:
            events += [(4, self.pools[LIST].writes), (4, self.list_tried), (1, lambda: self.list_tried(good=False))]
        weights, acts = zip(*events, strict=True)
        rng.choices(acts, weights)[0]()
        bystander = self.pools[BYSTANDER]
        assert (bystander.in_force.number, bystander.said.finished, bystander.trial) == (1, 0, None), "it has changed"

    def settle(self) -> None:
        """Lets every process do what it has to, until nothing changes any more."""
        for _ in range(QUIET_TURNS):
            for key, pool in self.pools.items():
                if pool.trial is not None and key != LIST:
                    if not pool.killed:
                        pool.writes()
                    pool.ends()
                elif pool.trial is not None:
                    if not pool.killed:
                        pool.writes()
                    self.list_tried()
                for ordinal in range(ORDINALS):
                    pool.adopts(ordinal)
            self.turn()
            idle = all(isinstance(pool.rollout.state, Idle) and pool.trial is None for pool in self.pools.values())
            if idle and self.rollouts.next_deadline(self.now) > 0.0 and self.rollouts.round is None:
                return
        raise AssertionError("it never ends")


def order(seed: int) -> None:
    """Plays one order of events. Raises AssertionError if something does not hold."""
    rng = random.Random(seed)
    many = Many(rng)
    for _ in range(rng.randrange(1, STEPS)):
        many.step()
    many.settle()
    assert len(many.answers) == many.asked == many.pools[LIST].said.answered, "a reload of all without an answer"
    for answer in many.answers:
        assert not answer.results or answer.results.keys() == set(range(POOLS)), "a pool without a result"
        assert all(result.said is not None or result.text in (GONE, UNCHANGED) for result in answer.results.values())
    for pool in many.pools.values():
        assert pool.used == pool.wanted(), "processes with different configurations"
        assert pool.said.answered == pool.asked, "an ask without an answer"
        assert (pool.said.busy, pool.said.owed) == (False, False)
        assert pool.rollout.number == pool.in_force.number


if __name__ == "__main__":
    sys.exit(play(order, STEPS, sys.argv[1:]))
