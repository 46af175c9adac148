"""Quantities, sizes, durations and booleans as operators write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.quantities import parse_bool, parse_duration, parse_quantity, parse_size
from tests.cases import cases


@cases(
    ("text", "value"),
    [
        ("0", 0), ("1", 1), ("1k", 1000), ("1Ki", 1024), ("1Gi", 1 << 30), ("500M", 500_000_000),
        ("1.5Gi", 3 << 29), (".5k", 500), ("2.", 2),
        ("100m", 1), ("1500m", 2), ("1e3", 1000), ("1E3", 1000), ("1E", 10**18), ("12e-1", 2), ("-5", -5), ("+5", 5), ("1n", 1),
        ("9223372036854775807", 2**63 - 1),
    ],
)  # fmt: skip
def test_a_quantity_is_read_as_kubernetes_reads_it(text: str, value: int) -> None:
    assert parse_quantity(text) == value


@cases(
    "text",
    ["", "1GB", "1gi", "Gi", "1 Gi", "1K", "--1", "1e", "1e9999", "0x10", "1,5", "9223372036854775808", "8Ei", "1" * 80, "٣", "1e999"],
)
def test_a_text_that_is_not_a_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"quantity|64-bit"):
        parse_quantity(text)


def test_a_size_may_end_in_b_and_is_not_negative() -> None:
    assert parse_size("10MiB") == 10 << 20
    assert parse_size(" 25MB ") == 25_000_000
    assert parse_size("5b") == 5
    with pytest.raises(ValueError, match="negative"):
        parse_size("-1Ki")
    with pytest.raises(ValueError, match="not a quantity"):
        parse_size("B")


@cases(
    ("text", "seconds"),
    [("0", 0.0), ("1m30s", 90.0), ("200ms", 0.2), ("1.5h", 5400.0), ("-5s", -5.0), ("+5s", 5.0), ("1us", 1e-6), ("1µs", 1e-6),
        ("1μs", 1e-6), (".5s", 0.5), ("-0", 0.0), ("1h1m1s1ms", 3661.001)],
)  # fmt: skip
def test_a_duration_is_read_as_go_reads_it(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@cases("text", ["", "5", "s", "1s ", "1 s", "1d", "1m 30s", "--1s", ".s", "9999999999h", "1s" * 60])
def test_a_text_that_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|292 years"):
        parse_duration(text)


@given(st.integers(0, 10**6), st.integers(0, 59), st.integers(0, 999))
def test_a_duration_is_the_sum_of_its_parts(hours: int, minutes: int, milliseconds: int) -> None:
    assert parse_duration(f"{hours}h{minutes}m{milliseconds}ms") == pytest.approx(hours * 3600 + minutes * 60 + milliseconds / 1000)


@given(st.text(max_size=12))
def test_any_text_is_parsed_or_raises_value_error(text: str) -> None:
    for parse in (parse_quantity, parse_duration, parse_size, parse_bool):
        try:
            parse(text)
        except ValueError as error:
            assert str(error)


def test_booleans_are_those_of_go_in_upper_or_lower_case() -> None:
    assert [parse_bool(text) for text in ("1", "t", "TRUE", " true ")] == [True] * 4
    assert [parse_bool(text) for text in ("0", "F", "false")] == [False] * 3
    with pytest.raises(ValueError, match="'yes' is neither true nor false"):
        parse_bool("yes")
