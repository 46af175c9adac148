"""How long a request waits: the TTLs in force, and sweeps that end it."""

from math import inf

from epp.flow.outcomes import EVICTED_NO_ENDPOINTS, EVICTED_TTL
from tests.cases import cases
from tests.epp.flow.policies import band, plan
from tests.epp.flow.shards import FakeFuture, Shard


def test_a_request_that_waits_for_its_whole_ttl_is_evicted() -> None:
    shard = Shard()
    call = shard.call()
    shard.after(59.9)
    assert call.outcome == ""
    shard.after(0.1)
    assert call.outcome == "EvictedTTL"
    assert call.error.ending is EVICTED_TTL


@cases(
    ("wish", "of_band", "of_all", "expected"),
    [
        (None, None, 60.0, 60.0),
        (5.0, None, 60.0, 5.0),
        (90.0, None, 60.0, 60.0),
        (None, 7.0, 60.0, 7.0),
        (9.0, 7.0, 60.0, 7.0),
        (None, 90.0, 60.0, 90.0),
        (80.0, 90.0, 60.0, 80.0),
        (None, inf, 60.0, inf),
        (5.0, inf, 60.0, 5.0),
        (None, None, inf, inf),
        (5.0, None, inf, 5.0),
    ],
)
def test_a_requested_ttl_shortens_the_configured_one_and_never_lengthens_it(
    wish: float | None, of_band: float | None, of_all: float, expected: float
) -> None:
    shard = Shard(plan(band(0, request_ttl_s=of_band), request_ttl_s=of_all))
    call = shard.call(ttl_s=wish)
    (entry,) = shard.controller._registry.order[0].entries()
    assert entry.ttl_s == expected
    shard.after(min(expected, 1e6) - 0.1)
    assert call.outcome == ""
    shard.after(0.1)
    assert call.outcome == ("" if expected == inf else "EvictedTTL")


def test_while_the_pool_is_empty_the_no_endpoint_ttl_is_in_force() -> None:
    shard = Shard(plan(no_endpoint_ttl_s=300.0))
    shard.gate.empty = True
    call = shard.call()
    shard.after(299.0)
    assert call.outcome == ""
    shard.after(1.0)
    assert call.outcome == "EvictedNoEndpoints"
    assert call.error.ending is EVICTED_NO_ENDPOINTS


def test_a_pool_that_comes_back_gives_each_request_a_full_ttl() -> None:
    shard = Shard(plan(request_ttl_s=10.0, no_endpoint_ttl_s=100.0))
    shard.gate.empty = True
    call = shard.call()
    shard.after(50.0)
    shard.gate.empty = False
    shard.after(0.0)
    shard.after(9.9)
    assert call.outcome == ""
    shard.after(0.1)
    assert call.outcome == "EvictedTTL"


def test_a_wait_ends_however_often_the_pool_comes_and_goes() -> None:
    shard = Shard(plan(request_ttl_s=10.0, no_endpoint_ttl_s=20.0))
    call = shard.call()
    for _ in range(5):
        shard.gate.empty = not shard.gate.empty
        shard.after(0.0)
        shard.after(4.3)
    assert call.outcome == "", "21.5 s of 22"
    shard.after(0.6)
    assert call.outcome == "EvictedNoEndpoints"


def test_a_sweep_returns_when_the_next_one_is_due() -> None:
    shard = Shard()
    shard.call(ttl_s=3.0)
    shard.call(ttl_s=2.0)
    assert shard.controller.sweep(1_000.0) == 1_002.0
    shard.clock.now = 1_002.0
    assert shard.controller.sweep(1_002.0) == 1_003.0
    shard.clock.now = 1_003.0
    assert shard.controller.sweep(1_003.0) == 1_063.0, "then the idle flow is removed"
    assert shard.controller.sweep(1_063.0) == inf


def test_a_requested_ttl_of_zero_dispatches_at_once_or_evicts_even_if_making_the_future_sweeps() -> None:
    shard = Shard()

    def sweeping(_item: object) -> FakeFuture:
        shard.controller.sweep(shard.clock.now)
        return FakeFuture()

    shard.controller._make_future = sweeping
    assert shard.call(ttl_s=0.0).outcome == "EvictedTTL"
    shard.gate.places = 1
    assert shard.call(ttl_s=0.0).outcome == "Dispatched"
