"""The decoder of KV events: every dialect, and any bytes."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.prefix.kv_events import (
    BLOCKS_MAX,
    CLEARED_MAX,
    EVENTS_MAX,
    SEQUENCE_MAX,
    Batch,
    Cleared,
    MalformedBatch,
    Removed,
    Stored,
    decode,
    sequence_of,
    topic_parts,
)
from tests.cases import cases
from tests.examples import examples

encode = msgspec.msgpack.encode
STORED = ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2]


def one(event, **batch):
    """The only event of a payload."""
    decoded = decode(encode([1.5, [event]]))
    assert decoded.malformed == 0
    (only,) = decoded.events
    return only


def test_an_array_with_missing_trailing_fields_is_a_stored_event_of_the_base_model_on_the_gpu() -> None:
    event = one(STORED)
    assert (event.hashes, event.parent, event.block_tokens) == ([11, 12], 10, 2)
    assert event.tokens.tolist() == [1, 2, 3, 4]
    assert event.tokens.dtype == np.uint32
    assert (event.adapter, event.tier, event.group, event.kind) == ("", "gpu", None, "")


def test_recorded_events_of_vllm_with_explicit_nils_and_groups_are_read() -> None:
    event = one([*STORED, None, "GPU", None, [None, None], 0, "full_attention", None])
    assert (event.group, event.kind, event.extras, event.tier) == (0, "full_attention", (), "gpu")


def test_a_map_event_equals_the_array_event() -> None:
    fields = {"block_hashes": [11, 12], "parent_block_hash": 10, "token_ids": [1, 2, 3, 4], "block_size": 2}
    mapped, listed = one({"type": "BlockStored", **fields, "locality": "LOCAL"}), one(STORED)
    assert [repr(value) for value in mapped] == [repr(value) for value in listed]


def test_one_payload_may_have_both_forms_and_may_be_a_map() -> None:
    events = [STORED, {"type": "BlockRemoved", "block_hashes": [1]}, ["AllBlocksCleared"], {"type": "AllBlocksCleared"}]
    batch = decode(encode({"ts": 1.0, "events": events, "data_parallel_rank": 3}))
    assert [type(event) for event in batch.events] == [Stored, Removed, Cleared, Cleared]
    assert batch.rank == 3


def test_two_fields_make_a_batch() -> None:
    assert decode(encode([1.0, [["AllBlocksCleared"]]])) == Batch([Cleared()], 0, None)


@pytest.mark.parametrize(
    ("value", "expected"), [(5, 5), (2**64 - 1, 2**64 - 1), (-1, 2**64 - 1), (b"\x00" * 24 + b"\x01" * 8, 0x0101010101010101), (b"\x07", 7)]
)
def test_a_hash_is_an_integer_of_any_width_or_the_last_eight_bytes(value, expected) -> None:
    assert one(["BlockRemoved", [value]]).hashes == [expected]


def test_a_parent_of_zero_means_none() -> None:
    assert one(["BlockStored", [11], 0, [1, 2], 2]).parent is None


@pytest.mark.parametrize(
    ("medium", "tier"), [("GPU", "gpu"), ("CPU", "cpu"), ("CPU_PINNED", "cpu"), ("DISK", "disk"), ("STORAGE", "storage"), (None, "gpu")]
)
def test_the_medium_names_the_tier(medium, tier) -> None:
    assert one(["BlockRemoved", [1], medium]).tier == tier
    assert one([*STORED, None, medium]).tier == tier


def test_older_sglang_has_a_map_with_the_salt_in_the_place_of_the_adapter() -> None:
    event = one(["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU", {"cache_salt": "s"}])
    assert event.adapter == ""
    assert [list(names) for names in event.extras] == [["s"], []]


def test_the_salt_of_sglangs_map_belongs_to_the_first_block_of_a_prompt_only() -> None:
    fields = {"type": "BlockStored", "block_hashes": [11], "token_ids": [1, 2], "block_size": 2, "cache_salt": "s"}
    assert [list(names) for names in one({**fields, "parent_block_hash": None}).extras] == [["s"]]
    assert list(one({**fields, "parent_block_hash": 4}).extras) == []


@pytest.mark.parametrize(
    ("more", "name", "number"), [([3], "", 3), ([3, "GPU", "sql"], "sql", 3), (["id"], "", "id"), ([None], "", None), ([0], "", None)]
)
def test_an_adapter_has_a_number_and_perhaps_a_name(more, name, number) -> None:
    event = one([*STORED, *more])
    assert (event.adapter, event.adapter_id) == (name, number)


def test_sglang_with_eagle_has_pairs_of_tokens_and_the_first_ones_count() -> None:
    pairs = [[100, 101], [101, 102], [102, 103], [103, 104]]
    assert one(["BlockStored", [11, 12], None, pairs, 2]).tokens.tolist() == [100, 101, 102, 103]
    assert one({"type": "BlockStored", "block_hashes": [1], "token_ids": pairs, "block_size": 4}).tokens.dtype == np.uint32


def test_extra_keys_are_strings_or_pairs_and_the_adapters_name_is_none_of_them() -> None:
    event = one([*STORED, 1, "GPU", "sql", [["sql", ["picture", 7]], None]])
    assert [list(names) for names in event.extras] == [["picture"], []]
    assert [list(names) for names in one([*STORED, None, None, None, [[["p", 0], 5, None, "q"]]]).extras] == [["p", "q"], []]


@cases(
    "event",
    [
        ["Unknown"], [], {}, 7, None, "BlockStored", ["BlockStored"], ["BlockStored", 5], ["BlockStored", ["x"], None, [1], 1],
        ["BlockStored", [1], None, [1.5], 1], ["BlockStored", [1], None, [-1], 1], ["BlockStored", [1], None, [2**32], 1],
        ["BlockStored", [1], None, [1, 2], 0], ["BlockStored", [1], None, [1, 2], -2], ["BlockStored", [1], None, [1, 2], "2"],
        ["BlockStored", [1], 1.5, [1, 2], 2], ["BlockStored", [1], None, [[1]], 1], ["BlockStored", [1], None, [1], 1, [1]],
        ["BlockStored", [b""], None, [1], 1], ["BlockRemoved", [1], 5], ["BlockRemoved", [1], "GPU", "x"],
        {"type": ["BlockStored"]}, {"type": "BlockStored", "block_hashes": None}, ["BlockStored", [1], None, [1, True, None], 1],
        ["BlockStored", [1], None, [[1, 2], 3], 2], ["BlockStored", [1], None, [[1, 2], [3]], 2],
        ["BlockStored", [1], None, [["1", 2]], 1], ["BlockStored", [1], None, [1], 1 << 40],
        ["BlockStored", [1], None, [1], 1, None, "x" * 5000],
    ],
)  # fmt: skip
def test_a_malformed_event_is_skipped_and_counted_and_the_others_count(event) -> None:
    batch = decode(encode([1.0, [event, ["AllBlocksCleared"]]]))
    assert batch.malformed == 1
    assert list(batch.events) == [Cleared()]


@pytest.mark.parametrize(
    "event", [b"\x92\xa1x\xa2\xff\xfe", b"\x81\x81\x01\x02\x03", b"\x91" * 500 + b"\x90"], ids=["text", "key", "depth"]
)
def test_an_event_that_cannot_be_decoded_is_skipped_and_the_others_count(event: bytes) -> None:
    events = b"\x92" + event + encode(["AllBlocksCleared"])
    for payload in (
        b"\x93" + encode(1.0) + events + encode(3),
        b"\x82" + encode("events") + events + encode("data_parallel_rank") + encode(3),
    ):
        assert decode(payload) == Batch([Cleared()], 1, 3)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x90" * 2000, encode(5), encode([]), encode([1.0]), encode([1.0, 5]), encode({})])
def test_a_payload_that_is_no_batch_is_refused(payload) -> None:
    with pytest.raises(MalformedBatch):
        decode(payload)


def test_a_number_has_eight_bytes() -> None:
    assert sequence_of((7).to_bytes(8, "big")) == 7
    assert sequence_of(b"7") is None


@pytest.mark.parametrize(
    ("topic", "parts"), [(b"kv@10.0.0.1:8000@m/x", ("10.0.0.1:8000", "m/x")), (b"", ("", "")), (b"kv@p", ("p", "")), (b"\xff@", ("", ""))]
)  # fmt: skip
def test_the_topic_names_pod_and_model(topic, parts) -> None:
    assert topic_parts(topic) == parts


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(max_size=9)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,  # with many more, half of the examples are too large for Hypothesis, which then makes others
)
tags = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"])
odd_events = st.tuples(tags, st.lists(values, max_size=11)).map(lambda pair: [pair[0], *pair[1]])


@examples(300)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_malformed(payload) -> None:
    try:
        batch = decode(payload)
    except MalformedBatch:
        return
    assert batch.malformed >= 0


@examples(300)
@given(st.lists(odd_events | values, max_size=4))
def test_every_event_of_a_list_is_taken_or_counted(events) -> None:
    batch = decode(encode([0.0, events]))
    assert len(batch.events) + batch.malformed == len(events)
    for event in batch.events:
        if isinstance(event, Stored):
            assert event.tokens is None or event.tokens.dtype == np.uint32
            assert len(event.extras) in (0, len(event.hashes))


@pytest.mark.parametrize("tokens", [["x" * 1_000_000, *["a"] * 2000], [1, "x"], [1.5], [-1], [1 << 32], [[1]], [None], [b"x"]])
def test_token_ids_that_are_no_ids_are_malformed_and_take_no_memory(tokens) -> None:
    batch = decode(encode([1.0, [["BlockStored", [1], None, tokens, len(tokens)], ["BlockRemoved", [2]]]]))
    assert (batch.malformed, [type(event) for event in batch.events]) == (1, [Removed])


def test_a_number_that_no_publisher_can_reach_is_none() -> None:
    numbers = [0, 1, SEQUENCE_MAX, SEQUENCE_MAX + 1, 2**64 - 1]
    assert [sequence_of(number.to_bytes(8, "big")) for number in numbers] == [0, 1, SEQUENCE_MAX, None, None]


@pytest.mark.parametrize("group", [-1, 64, 2**63])
def test_a_group_outside_of_the_limit_is_malformed(group: int) -> None:
    assert decode(encode([1.0, [[*STORED, None, None, None, None, group]]])).malformed == 1


@pytest.mark.parametrize(
    ("within", "beyond"),
    [
        ([None] * EVENTS_MAX, [None]),
        ([["BlockRemoved", [1] * BLOCKS_MAX]], [["BlockRemoved", [1]]]),
        ([["AllBlocksCleared"]] * CLEARED_MAX, [["AllBlocksCleared"]]),
    ],
)
def test_a_payload_of_more_work_than_an_engine_causes_is_malformed(within, beyond) -> None:
    decode(encode([1.0, within]))
    with pytest.raises(MalformedBatch):
        decode(encode([1.0, within + beyond]))
