"""No body keeps the loop busy out of proportion to its size; what it takes exactly, `python -m tests.bench.busy` says."""

import pytest

from tests.bench.busy import BODIES, MIB, Served, allowed_ms

SLACK = 6.0  # for machines that are busy or slow: a cost that grows faster than the body is far above


@pytest.fixture(scope="module")
def served() -> Served:
    return Served()


@pytest.mark.parametrize("name", BODIES)
def test_a_body_of_a_mib_takes_no_longer_than_its_size_allows(served: Served, name: str) -> None:
    took = min(served.longest(BODIES[name], MIB) for _ in range(2))
    assert took * 1e3 < SLACK * allowed_ms(MIB)
