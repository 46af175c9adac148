"""No body keeps the event loop busy out of proportion to its size. `python -m tests.bench.busy` prints the exact figures."""

import pytest

from tests.bench.busy import BODIES, MIB, Served, allowed_ms

SLACK = 6.0  # for busy or slow machines; a cost that grows faster than the body is far above it


@pytest.fixture(scope="module")
def served() -> Served:
    return Served()


@pytest.mark.parametrize("name", BODIES)
def test_a_body_of_a_mib_stays_within_its_limit(served: Served, name: str) -> None:
    took = min(served.longest(BODIES[name], MIB) for _ in range(2))
    assert took * 1e3 < SLACK * allowed_ms(MIB)
