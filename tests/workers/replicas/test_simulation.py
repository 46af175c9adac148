import pytest

from tests.workers.replicas.simulation import World


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_sums_converge_after_loss_delay_and_repetition(first: int) -> None:
    for seed in range(first, first + 50):
        World(seed).run()
