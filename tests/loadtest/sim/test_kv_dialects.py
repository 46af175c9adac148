"""The events of simulated servers, in every dialect, tell exactly what their pools hold."""

import pytest

from epp.prefix.kv_events import Cleared, Removed, Stored, decode
from loadtest.sim.engine import Job
from loadtest.sim.kv_dialects import DIALECTS, Dialect, events_of, payload, tokens_of
from loadtest.sim.kv_pool import Dropped, Gained, Offloaded
from tests.bench.kv_fleet import KvFleet


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_can_be_decoded(name: str) -> None:
    prompt = bytes(range(128))
    job = Job([11, 12], 32, 1, prompt=prompt, salt="tenant")
    changes = [Gained(0, 1), Gained(1, 2), Offloaded(5), Dropped(5, "GPU"), Dropped(6, "GPU"), Dropped(7, "CPU")]
    batch = decode(payload(events_of(Dialect(name), job, changes, 16)))
    assert batch.malformed == 0
    first, second, moved, *removed = batch.events
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert isinstance(moved, Stored)
    assert first.tokens is not None
    assert second.tokens is not None
    assert (first.hashes, first.parent, first.tokens.tolist()) == ([11], None, tokens_of(prompt[:64]))
    assert [list(extra) for extra in first.extras] == [["tenant"]]
    assert (second.hashes, second.parent, second.tokens.tolist()) == ([12], 11, tokens_of(prompt[64:]))
    assert (moved.hashes, moved.tokens, moved.tier) == ([5], None, "cpu")
    assert [(event.hashes, event.tier) for event in removed if isinstance(event, Removed)] == [([5, 6], "gpu"), ([7], "cpu")]
    assert decode(payload([Dialect(name).cleared()])).events == [Cleared()]


def test_a_prompt_has_a_token_per_four_bytes_and_at_least_one() -> None:
    assert tokens_of(b"\1\0\0\0\2") == [1, 2]
    assert tokens_of(b"") == [0]


@pytest.mark.parametrize("seed", range(3))
def test_after_thousands_of_events_the_index_equals_the_pools(seed: int) -> None:
    fleet = KvFleet(seed)
    steps = 0
    while fleet.events < 4_000:
        steps += 1
        place, message = fleet.step()
        if message:
            fleet.apply(place, message, steps)
    assert min(engine.events for engine in fleet.engines) > 100
    assert fleet.writer.evictions == 0
    assert fleet.differences() == 0
    counts = fleet.holdings.counts
    assert (counts.malformed_events, counts.malformed_batches, counts.stores_skipped, counts.removals_skipped) == (0,) * 4
