"""Half surrogate pairs in JSON text are found, and nothing else."""

import json
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.protocol.surrogates import HALVES_MAX, LOOKS_MAX, RUN, replaced


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (rb'"a\ud83d"', rb'"a\ufffd"'),
        (rb'"\uDE00b"', rb'"\ufffdb"'),
        (rb'"\ud83d\ud83d\ude00"', rb'"\ufffd\ud83d\ude00"'),
        (rb'"\ud83d\ude00\ude00"', rb'"\ud83d\ude00\ufffd"'),
        (rb'"\\\ud83d"', rb'"\\\ufffd"'),
        (rb'"\ud83dx\ude00"', rb'"\ufffdx\ufffd"'),
        (b"\xef\xbb\xbf{}", b"   {}"),
        (b'\xef\xbb\xbf"\\ud83d"', rb'   "\ufffd"'),
    ],
)
def test_each_half_is_replaced_and_the_length_stays(text: bytes, expected: bytes) -> None:
    assert replaced(text) == expected
    assert replaced(memoryview(text)) == expected


@pytest.mark.parametrize("text", [b"", b"{}", rb'"\ud83d\ude00"', rb'"\\ud83d"', rb'"\u00e9"', b'"\xf0\x9f\x98\x80"', rb"\ud8"])
def test_a_text_without_a_half_is_left_alone(text: bytes) -> None:
    assert replaced(text) is None


@given(st.text(st.characters(codec=None), max_size=50))
def test_the_result_is_readable_and_differs_only_in_the_halves(text: str) -> None:
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # joins neighbours that make a pair
    body = json.dumps(text).encode()
    readable = replaced(body)
    found = msgspec.json.decode(body if readable is None else readable)
    assert found == (whole if readable is not None else found)
    assert "\\ud8" not in found or readable is None


def test_very_many_halves_are_not_replaced() -> None:
    assert replaced(rb'"' + rb"\ud83d " * HALVES_MAX + rb'"') is not None
    assert replaced(rb'"' + rb"\ud83d " * (HALVES_MAX + 1) + rb'"') is None


@pytest.mark.parametrize("backslashes", [0, 1, RUN - 2, RUN - 1, RUN, RUN + 1, 2 * RUN - 1, 2 * RUN, 2 * RUN + 1, 1000])
@pytest.mark.parametrize("before", [b"", b'"'])
def test_a_half_is_found_behind_any_number_of_escaped_backslashes(backslashes: int, before: bytes) -> None:
    half, replacement = before + b"\\" * backslashes + rb"\ud83d", before + b"\\" * backslashes + rb"\ufffd"
    assert replaced(half) == (None if backslashes % 2 else replacement)


@pytest.mark.parametrize("unit", [rb"\\ud83d", rb"\ud83d\ude00", b"\\" * 7 + b"ud83d", rb"\uD"])
def test_a_text_with_very_many_escapes_of_halves_is_not_searched(unit: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    monkeypatch.setattr("epp.protocol.surrogates._places", lambda text: searched.append(len(text)) or iter(()))
    replaced(unit * (LOOKS_MAX // unit.lower().count(b"ud")))
    assert searched
    assert replaced(unit * (LOOKS_MAX + 1)) is None
    assert len(searched) == 1


@pytest.mark.parametrize("unit", [b"\\", rb"\u", rb"\ud", rb"\ud83d\ude00", b"\\" * 7 + b"ud83d"])
def test_hostile_texts_take_linear_time(unit: bytes) -> None:
    def seconds(size: int) -> float:
        text = unit * (size // len(unit))
        begun = time.process_time()
        replaced(text)
        return time.process_time() - begun

    assert min(seconds(1 << 21) for _ in range(3)) < 40 * max(0.002, min(seconds(1 << 17) for _ in range(3)))
