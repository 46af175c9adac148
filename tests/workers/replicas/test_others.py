import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled import kernels
from compiled.kernels import areas_reference
from tests.workers.replicas.messages import message, rows_of
from workers.replicas.others import BYTES_MAX, FADE_S, MESSAGES_MAX, REMEMBERED_S, SUPERSEDED_S, Others
from workers.replicas.wire import (
    EPOCH_FOLLOWED_MAX,
    FORM,
    POOLS_MAX,
    REQUESTS_MAX,
    ROW,
    ROWS_MAX,
    TOKENS_MAX,
    Band,
    Flow,
    Message,
    PoolFlow,
    encode,
)


def others(most: int = 8) -> Others:
    return Others("a", (5, 1), most)


def test_what_others_have_is_summed_by_endpoint() -> None:
    seen = others()
    seen.receive(message("b", 1, {1: (2, 20), 2: (1, 5)}), 0.0)
    seen.receive(message("c", 1, {1: (3, 30)}), 0.0)
    assert seen.totals == {1: (5, 50), 2: (1, 5)}
    assert dict(seen.take()) == {1: (5, 50), 2: (1, 5)}
    seen.receive(message("b", 2, {2: (0, 0)}), 0.0)
    assert dict(seen.take()) == {2: (0, 0)}
    assert seen.of(1) == {"b": 2, "c": 3}


def test_a_whole_message_removes_what_it_does_not_name() -> None:
    seen = others()
    seen.receive(message("b", 1, {1: (2, 0), 2: (1, 0)}), 0.0)
    seen.receive(message("b", 2, {2: (4, 0)}, whole=True), 0.0)
    assert seen.totals == {2: (4, 0)}


ROWS = st.lists(st.tuples(st.sampled_from([1, 2, 1 << 63]), st.integers(0, 2), st.sampled_from([0, 5, 1 << 63])), max_size=6)


@given(st.lists(st.tuples(st.booleans(), ROWS), max_size=8))
def test_the_kernel_merges_loads_as_the_reference_does(steps: list[tuple[bool, list[tuple[int, int, int]]]]) -> None:
    results = []
    for merge in (kernels.merge_loads, areas_reference.merge_loads):
        loads: list[dict[int, tuple[int, int]]] = [{}, {}]
        totals: dict[int, tuple[int, int]] = {}
        changed: list[set[int]] = []
        for which, said in steps:
            changed.append(set())
            rows = b"".join(ROW.pack(*row) for row in said)
            merge(loads[which], totals, changed[-1], rows, REQUESTS_MAX, TOKENS_MAX, ROWS_MAX)
        results.append((loads, totals, changed))
    assert results[0] == results[1]


def test_a_kernel_refuses_half_a_row_and_ignores_endpoints_beyond_its_bound() -> None:
    loads: dict[int, tuple[int, int]] = {}
    rows = rows_of({1: (1, 1), 2: (2, 2), 3: (3, 3)})
    kernels.merge_loads(loads, {}, set(), rows, 9, 9, 2)
    assert loads == {1: (1, 1), 2: (2, 2)}
    with pytest.raises((TypeError, struct.error), match="20 bytes"):
        kernels.merge_loads(loads, {}, set(), rows[1:], 9, 9, 2)


def test_a_killed_replica_stops_counting_after_a_second() -> None:
    seen = others()
    seen.receive(message("b", 1, {1: (2, 0)}), 0.0)
    assert seen.expire(FADE_S) == []
    assert seen.expire(FADE_S + 0.01) == ["b"]
    assert seen.totals == {}


def test_late_and_repeated_messages_do_not_count() -> None:
    seen = others()
    seen.receive(message("b", 5, {1: (2, 0)}), 0.0)
    for sequence in (5, 4, 1):
        assert seen.receive(message("b", sequence, {1: (9, 0)}), 0.1) is None
    assert seen.totals == {1: (2, 0)}
    assert seen.refused == {"old": 3}


def test_messages_from_before_a_silence_do_not_count_after_it() -> None:
    seen = others()
    seen.receive(message("b", 5, {1: (2, 0)}), 0.0)
    seen.expire(2.0)
    assert seen.receive(message("b", 4, {1: (9, 0)}), 10.0) is None
    assert seen.receive(message("b", 6, {1: (3, 0)}), 10.0) is not None
    assert seen.totals == {1: (3, 0)}
    seen.expire(20.0)
    seen.expire(20.0 + REMEMBERED_S)
    assert seen.receive(message("b", 1, {1: (1, 0)}), 60.0) is not None


def test_a_new_life_of_a_replica_replaces_the_old_one() -> None:
    seen = others()
    seen.receive(message("b", 50, {1: (2, 0), 2: (2, 0)}), 0.0)
    seen.receive(message("b", 1, {2: (1, 0)}, epoch=2), 0.0)
    assert seen.totals == {2: (1, 0)}
    assert seen.receive(message("b", 51, {1: (2, 0)}), 0.0) is None


def test_of_two_replicas_with_one_name_the_earlier_one_becomes_silent() -> None:
    seen = others()
    seen.receive(message("a", 1, {1: (2, 0)}, epoch=4), 0.0)
    assert not seen.superseded(0.0)
    assert seen.refused == {"old": 1}
    seen.receive(message("a", 1, {1: (2, 0)}, epoch=6), 0.0)
    assert seen.superseded(0.0)
    assert not seen.superseded(SUPERSEDED_S)
    assert seen.totals == {}


def test_a_replica_knows_its_own_messages() -> None:
    seen = others()
    seen.receive(message("a", 7, {1: (2, 0)}, epoch=5, origin=1), 0.0)
    assert (seen.echo, seen.totals, seen.superseded(0.0)) == (7, {}, False)


def test_more_replicas_than_allowed_are_ignored() -> None:
    seen = others(most=2)
    for name in "bcd":
        seen.receive(message(name, 1, {1: (1, 0)}), 0.0)
    assert seen.totals == {1: (2, 0)}
    assert seen.refused == {"many": 1}
    seen.expire(2.0)
    assert seen.receive(message("d", 2, {1: (1, 0)}), 2.0) is not None


def test_beyond_its_rate_a_replica_is_not_heard_and_the_others_are() -> None:
    seen = others()
    for sequence in range(1, MESSAGES_MAX + 11):
        seen.receive(message("b", sequence, epoch=sequence), 0.0)  # a new life each time changes nothing
    assert seen.refused == {"rate": 9}, "the first message came from a stranger"
    assert seen.receive(message("c", 1, {1: (1, 0)}), 0.9) is not None
    assert seen.receive(message("b", MESSAGES_MAX + 11, epoch=MESSAGES_MAX + 11), 1.0) is not None


def test_more_bytes_per_second_than_a_replica_sends_are_not_read() -> None:
    seen = others()
    seen.receive(message("b", 1), 0.0)
    junk = message("b", 2)[:12] + bytes(BYTES_MAX // 8 - 12)
    for _ in range(20):
        seen.receive(junk, 0.0)
    assert seen.refused == {"malformed": 8, "rate": 12}


def test_strangers_and_garbage_have_one_rate_together() -> None:
    seen = others(most=1)
    for _ in range(MESSAGES_MAX + 5):
        seen.receive(b"garbage", 0.0)
    assert seen.refused == {"malformed": MESSAGES_MAX, "rate": 5}
    assert seen.receive(message("b", 1), 1.0) is not None
    for number in range(3):
        seen.receive(message(f"c{number}", 1) + b"unread", 1.0)
    assert seen.refused["many"] == 3


def test_the_highest_number_that_was_seen_is_known_unless_it_is_a_lie() -> None:
    seen = others()
    seen.receive(message("b", 1, epoch=9), 0.0)
    seen.receive(message("c", 1, epoch=7), 0.0)
    assert seen.highest == 9
    seen.receive(message("d", 1, epoch=EPOCH_FOLLOWED_MAX + 1), 0.0)
    assert seen.highest == 9


def test_lost_messages_are_counted() -> None:
    seen = others()
    for sequence in (1, 2, 5):
        seen.receive(message("b", sequence), 0.0)
    assert seen.lost == 2


def test_a_replica_that_names_endpoints_for_ever_takes_a_bounded_memory() -> None:
    seen = others()
    for sequence in range(1, 6):
        first = sequence * ROWS_MAX
        seen.receive(message("b", sequence, dict.fromkeys(range(first, first + ROWS_MAX), (1, 1))), 0.0)
    assert len(seen.live["b"].loads) == len(seen.totals) == ROWS_MAX


def test_a_lie_distorts_within_bounds() -> None:
    seen = others()
    seen.receive(encode(Message(FORM, "b", 1, 1, 1, True, 1, b"\xff" * 20)), 0.0)
    assert max(requests for requests, _ in seen.totals.values()) == REQUESTS_MAX


@given(st.lists(st.tuples(
    st.sampled_from("abc"), st.integers(1, 6), st.booleans(), st.integers(1, 3),
    st.dictionaries(st.integers(0, 3), st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3), st.floats(0, 0.7),
), max_size=40))  # fmt: skip
def test_totals_are_always_the_sum_of_what_live_replicas_said(steps: list) -> None:
    seen, now = others(), 0.0
    for name, sequence, whole, epoch, loads, passed in steps:
        now += passed
        seen.expire(now)
        seen.receive(message(name, sequence, loads, whole=whole, epoch=epoch), now)
        sums: dict[int, tuple[int, int]] = {}
        for other in seen.live.values():
            for key, (requests, tokens) in other.loads.items():
                before = sums.get(key, (0, 0))
                sums[key] = before[0] + requests, before[1] + tokens
        assert seen.totals == sums
        assert all(requests >= 0 and tokens >= 0 for requests, tokens in sums.values())


def waits(name: str, sequence: int, pools: dict[int, int], *, whole: bool = False) -> bytes:
    flows = [PoolFlow(pool, Flow([Band(0, count, count)] if count else [])) for pool, count in pools.items()]
    return encode(Message(FORM, name, 1, 7, sequence, whole, flows=flows))


def waiting(seen: Others, pool: int) -> int:
    return sum(band.requests for flow in seen.flows(pool) for band in flow.bands)


def test_what_waits_is_known_by_pool_and_a_whole_message_ends_what_it_does_not_name() -> None:
    seen = others()
    seen.receive(waits("b", 1, {1: 3, 2: 1}), 0.0)
    seen.receive(waits("c", 1, {2: 4}), 0.0)
    assert [waiting(seen, pool) for pool in (1, 2, 3)] == [3, 5, 0]
    assert seen.stirred >= {1, 2}
    seen.stirred.clear()
    seen.receive(waits("b", 2, {2: 0}), 0.0)
    assert seen.stirred == {2} and waiting(seen, 2) == 4
    seen.receive(waits("b", 3, {}, whole=True), 0.0)
    assert (waiting(seen, 1), waiting(seen, 2)) == (0, 4) and seen.stirred == {1, 2}
    seen.stirred.clear()
    seen.expire(FADE_S + 0.1)
    assert waiting(seen, 2) == 0 and 2 in seen.stirred


def test_a_replica_that_names_ever_more_pools_takes_a_bounded_memory() -> None:
    seen = others()
    for sequence in range(1, 4):
        first = sequence * POOLS_MAX
        seen.receive(waits("b", sequence, dict.fromkeys(range(first, first + POOLS_MAX), 1)), float(sequence))
    assert len(seen.live["b"].flows) <= POOLS_MAX + 1
