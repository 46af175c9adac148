"""Token usage is found whatever the chunk borders."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.decision import Usage
from epp.protocol.usage import USAGE_BYTES_MAX, UsageScanner

PLAIN = json.dumps(
    {
        "id": "x",
        "choices": [{"text": 'he said "usage": {"prompt_tokens": 1} \\'}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}},
        "after": 1,
    }
).encode()
SSE = (
    b'data: {"choices":[{"text":"a \\"usage\\": {"}],"usage":null}\n\n'
    b'data: {"choices":[],"usage": {"prompt_tokens":11,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
    b"data: [DONE]\n\n"
)
RESPONSES = (
    b'event: response.completed\ndata: {"type":"response.completed","response":{"usage":'
    b'{"input_tokens":11,"output_tokens":7,"input_tokens_details":{"cached_tokens":4}}}}\n\n'
)


def feed(data: bytes, cuts: list[int]) -> Usage | None:
    scanner = UsageScanner()
    borders = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for a, b in itertools.pairwise(borders):
        scanner.feed(data[a:b])
    return scanner.usage


@pytest.mark.parametrize("data", [PLAIN, SSE, RESPONSES])
@given(cuts=st.lists(st.integers(0, 10_000), max_size=60))
def test_usage_is_found_whatever_the_chunk_borders(data: bytes, cuts: list[int]) -> None:
    assert feed(data, cuts) == Usage(11, 7, 4)


@pytest.mark.parametrize("data", [PLAIN, SSE, RESPONSES])
def test_usage_is_found_byte_by_byte(data: bytes) -> None:
    assert feed(data, list(range(len(data)))) == Usage(11, 7, 4)


def test_the_last_usage_that_is_not_null_wins() -> None:
    first, second = (b'data: {"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\n' % n for n in (1, 2))
    data = first + second + b'data: {"usage":null}\n'
    assert feed(data, []) == Usage(1, 2, None)


def test_an_answer_without_usage_has_none() -> None:
    assert feed(b'data: {"choices":[]}\n\ndata: [DONE]\n\n', [3, 9]) is None


def test_an_endless_usage_object_costs_bounded_memory() -> None:
    scanner = UsageScanner()
    scanner.feed(b'{"usage": {"a": "')
    for _ in range(100):
        scanner.feed(b"x" * 1000)
    assert scanner.usage is None
    assert len(scanner._open or b"") <= USAGE_BYTES_MAX


@given(st.lists(st.binary(max_size=50), max_size=30))
def test_arbitrary_bytes_are_harmless(chunks: list[bytes]) -> None:
    scanner = UsageScanner()
    for chunk in chunks:
        scanner.feed(chunk)
        scanner.feed(b'"usage"')
    assert scanner.usage is None
