import contextlib
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tests.workers.replicas.messages import blocks, loads_of, message, rows_of
from workers.replicas.others import Others
from workers.replicas.reading import decode, sender
from workers.replicas.wire import (
    AGE_US_MAX,
    BUDGET,
    EPOCH_MAX,
    FORM,
    MESSAGE_BYTES_MAX,
    PAGES_MAX,
    REQUESTS_MAX,
    ROWS_MAX,
    RUNS_MAX,
    TOKENS_MAX,
    Blocks,
    Message,
    NotUsable,
    PageRows,
    encode,
    endpoint_key,
    page_row,
    secret_key,
)

NUMBERS = st.integers(0, (1 << 63) - 1)


def refusal(data: bytes) -> str:
    with pytest.raises(NotUsable) as refused:
        decode(data)
    return refused.value.why


@given(
    st.from_regex("[A-Za-z0-9._-]{1,50}", fullmatch=True), st.integers(0, EPOCH_MAX), NUMBERS, st.booleans(),
    st.dictionaries(NUMBERS, st.tuples(st.integers(0, REQUESTS_MAX), st.integers(0, TOKENS_MAX)), max_size=20),
    st.none() | st.lists(st.tuples(NUMBERS, st.lists(NUMBERS, max_size=8)), max_size=5), st.booleans(),
)  # fmt: skip
def test_a_message_survives_the_wire(
    name: str,
    epoch: int,
    sequence: int,
    whole: bool,
    loads: dict[int, tuple[int, int]],
    runs: list[tuple[int, list[int]]] | None,
    taken_back: bool,
) -> None:
    updates = None if runs is None else blocks(*runs)
    either = (None, updates) if taken_back else (updates, None)
    sent = Message(FORM, name, epoch, 3, sequence, whole, 5, rows_of(loads), None, *either)
    read = decode(encode(sent))
    assert read == sent
    assert dict(loads_of(read.loads)) == loads


@given(st.from_regex("[A-Za-z0-9._-]{1,300}", fullmatch=True))
def test_the_sender_is_known_without_reading_the_message(name: str) -> None:
    assert sender(message(name)) == name


@given(st.binary(max_size=20) | st.binary(max_size=10).map(lambda rest: b"\x9b\x01" + rest))
def test_the_sender_of_any_bytes_is_a_text_of_bounded_length(data: bytes) -> None:
    assert len(sender(data)) <= 301


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_are_refused(data: bytes) -> None:
    with contextlib.suppress(NotUsable):
        decode(data)


@given(st.data())
def test_a_changed_message_is_a_message_or_is_refused(data: st.DataObject) -> None:
    sent = bytearray(message(loads={1: (2, 3), 4: (5, 6)}))
    for _ in range(data.draw(st.integers(1, 5))):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    seen = Others("a", (1, 1), 8)
    seen.receive(bytes(sent), 0.0)
    loads = seen.totals.values()
    assert all(0 <= requests <= REQUESTS_MAX and 0 <= tokens <= TOKENS_MAX for requests, tokens in loads)


def test_a_message_of_another_version_is_told_from_a_malformed_one() -> None:
    assert refusal(encode((FORM + 1, {"anything": 1}))) == "form"
    assert refusal(encode(Message(FORM + 1, "a", 1, 1, 1))) == "form"
    assert refusal(b"\x00\x01") == "malformed"
    assert refusal(b"") == "malformed"


def test_sizes_are_bounded() -> None:
    assert refusal(b"x" * (MESSAGE_BYTES_MAX + 1)) == "long"
    assert refusal(encode(Message(FORM, "a" * 301, 1, 1, 1))) == "malformed"
    assert refusal(encode(Message(FORM, "a\n", 1, 1, 1))) == "malformed"
    assert refusal(encode(Message(FORM, "a", 1, 1, 1, loads=b"x" * 21))) == "malformed"
    assert refusal(encode(Message(FORM, "a", 1, 1, 1, loads=b"x" * 20 * (ROWS_MAX + 1)))) == "malformed"
    assert refusal(encode(Message(FORM, "a", 1, 1, 1, learned=blocks(*[(1, [1])] * (RUNS_MAX + 1))))) == "malformed"
    assert refusal(encode(Message(FORM, "a", -1, 1, 1))) == "malformed"


@pytest.mark.parametrize(
    "wrong",
    [
        Blocks(bytes(8), b"\1\0", b"1234567"),
        Blocks(bytes(8), b"\2\0", bytes(8)),
        Blocks(bytes(8), b"\1", bytes(8)),
        Blocks(bytes(8), b"", b""),
        Blocks(bytes(7), b"\1\0", bytes(8)),
        Blocks(b"", b"", bytes(8)),
        Blocks(bytes(16), b"\1\0", bytes(8)),
    ],
)
def test_blocks_whose_parts_do_not_fit_each_other_are_refused(wrong: Blocks) -> None:
    for part in ({"learned": wrong}, {"taken_back": wrong}):
        assert refusal(encode(Message(FORM, "a", 1, 1, 1, **part))) == "malformed"


def pages(age: int = 5, present: int = 3, values: tuple[float, float] = (1.0, 0.5), **other: Any) -> bytes:
    rows = page_row(2).pack(1, age, 4, present, *values)
    told = {"columns": 7, "width": 2, "rows": rows} | other
    return encode(Message(FORM, "a", 1, 1, 1, loads=rows_of({1: (2, 3)}), pages=PageRows(**told)))


def test_a_page_survives_the_wire() -> None:
    told = decode(pages()).pages
    assert told is not None
    assert list(page_row(told.width).iter_unpack(told.rows)) == [(1, 5, 4, 3, 1.0, 0.5)]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_page_may_have_any_finite_value_because_custom_metrics_may(value: float) -> None:
    assert decode(pages(values=(value, 0.5))).loads


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e15])
@pytest.mark.parametrize("at", range(4))
def test_a_message_with_a_use_that_no_tenant_has_is_malformed(number: float, at: int) -> None:
    used = [1.0, 2.0, 0.0, 0.0]
    assert decode(encode(Message(FORM, "a", 1, 1, 1, budgets=BUDGET.pack(7, *used[:2], 3, *used[2:]))))
    used[at] = number
    assert refusal(encode(Message(FORM, "a", 1, 1, 1, budgets=BUDGET.pack(7, *used[:2], 3, *used[2:])))) == "malformed"


@cases(
    "wrong",
    [
        pages(values=(math.nan, 0.5)),
        pages(values=(1.0, math.inf)),
        pages(values=(1.0, -math.inf)),
        pages(present=4),
        pages(age=AGE_US_MAX + 1),
        pages(width=3),
        pages(width=0),
        pages(width=65),
        pages(rows=b"x"),
        pages(rows=bytes((PAGES_MAX + 1) * 40)),
        pages(columns=-1),
    ],
)
def test_a_message_with_a_page_that_no_server_has_is_malformed_and_changes_nothing(wrong: bytes) -> None:
    assert refusal(wrong) == "malformed"
    seen = Others("b", (1, 1), 8)
    assert seen.receive(wrong, 0.0) is None
    assert (seen.totals, seen.refused) == ({}, {"malformed": 1})


class Earlier(msgspec.Struct, array_like=True, frozen=True):
    """A message of the version before pages were shared."""

    form: int
    name: str
    epoch: int
    origin: int
    sequence: int
    whole: bool = False
    secret: int = 0
    loads: bytes = b""
    flow: None = None
    learned: None = None
    taken_back: None = None
    wants: bool = False


def test_a_version_without_shared_pages_and_this_one_read_the_messages_of_each_other() -> None:
    here = msgspec.msgpack.decode(pages(), type=Earlier)
    assert loads_of(here.loads) == [(1, (2, 3))]
    there = decode(encode(Earlier(FORM, "a", 1, 1, 1, loads=rows_of({1: (2, 3)}), wants=True)))
    assert (loads_of(there.loads), there.wants, there.pages) == ([(1, (2, 3))], True, None)


def test_numbers_out_of_range_are_lowered_to_their_limits() -> None:
    seen = Others("a", (1, 1), 8)
    seen.receive(encode(Message(FORM, "b", 1, 1, 1, loads=b"\xff" * 20)), 0.0)
    assert seen.totals == {(1 << 64) - 1: (REQUESTS_MAX, TOKENS_MAX)}


def test_endpoints_and_secrets_are_named_by_hashes() -> None:
    assert endpoint_key("a") != endpoint_key("b")
    assert secret_key(1) != secret_key(2)
    assert 0 < secret_key(3) < 1 << 63
