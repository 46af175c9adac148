"""The number of replicas follows the work, and stays where it is under steady load."""

from epp.learning.model import LatencyModel
from epp.learning.replicas_needed import TARGET, Reading, ReplicasNeeded, batch_share
from tests.bench.replicas_needed import PlacesPool, day, office, steady


class Pool:
    """A pool whose requests each take `cost` replica seconds."""

    def __init__(self, cost: float = 0.1) -> None:
        self.signal, self.cost = ReplicasNeeded(), cost
        self.at, self.count = 0.0, 0

    def run(self, seconds: int, per_s: int, *, ready: int = 5, waiting: float = 0.0) -> list[int | None]:
        numbers = []
        for _ in range(seconds):
            self.at += 1.0
            self.count += per_s
            self.signal.read(Reading(self.at, ready, self.count, self.count, per_s * self.cost, waiting, 0.0))
            numbers.append(self.signal.needed)
        return numbers


def test_nothing_is_known_before_enough_was_seen() -> None:
    pool = Pool()
    assert pool.run(60, 30)[-1] is None and pool.signal.headroom is None


def test_the_number_is_the_work_divided_by_the_target() -> None:
    pool = Pool()
    numbers = pool.run(300, 30)
    assert numbers[-1] == 4  # 30 * 0.1 / 0.8 = 3.75
    assert pool.signal.headroom is not None and abs(pool.signal.headroom - (1.0 - 30 * 0.1 / TARGET / 5)) < 1e-6


def test_more_work_counts_at_once_and_less_work_after_minutes() -> None:
    pool = Pool()
    pool.run(600, 30)
    assert (pool.run(120, 60)[-1] or 0) >= 7
    pool.run(600, 60)
    assert pool.run(120, 30)[-1] == 8
    assert pool.run(900, 30)[-1] == 4


def test_a_queue_asks_for_replicas_that_work_it_off() -> None:
    pool = Pool()
    pool.run(300, 30)
    assert (pool.run(300, 30, waiting=2400.0)[-1] or 0) >= 6


def test_a_counter_that_falls_is_skipped() -> None:
    pool = Pool()
    pool.run(300, 30)
    pool.count = 0
    assert pool.run(30, 30)[-1] == 4


def test_a_share_of_a_batch_counts_as_slow_as_at_the_target() -> None:
    model = LatencyModel()
    for _ in range(300):
        for load in (1.0, 32.0, 64.0):
            model.learn_token(0, 0, load, 0.02 * (1.0 + 0.01 * load), 1.0)
    assert batch_share(model, 0, 0.0, 0.5) == 0.0
    assert batch_share(model, 0, 32.0, 0.0) == 0.0  # neither limit is known
    assert 0.5 < batch_share(model, 0, 32.0, 0.5) < 0.65


def test_on_a_day_the_number_is_near_the_oracles_and_steady_under_steady_load() -> None:
    assert day(PlacesPool(), office, 0).within > 0.99
    calm = day(PlacesPool(), steady, 0)
    assert max(calm.up, calm.down) <= 1
