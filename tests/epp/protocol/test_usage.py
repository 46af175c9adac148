"""Token usage is found whatever the chunk borders."""

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from epp.decision.decision import Usage
from epp.protocol import usage
from epp.protocol.usage import (
    ANSWER,
    BLANKS_MAX,
    KEY,
    KEYS_MAX,
    SUSPECT,
    UNSEEN,
    USAGE_BYTES_MAX,
    AnswerHandling,
    AnthropicScanner,
    HttpBodyScanner,
    Scanner,
    SglangScanner,
    UsageScanner,
    VllmEmbedScanner,
    VllmGenerateScanner,
)
from epp.protocol.usage_structs import TOKENS_MAX
from epp.request import Request
from tests.epp.plugins.parser_bodies import field, frame, packed

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


def test_the_last_of_many_usages_in_one_piece_counts() -> None:
    events = b"".join(b'data: {"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\n' % n for n in range(2 * KEYS_MAX))
    assert feed(events, []) == feed(events, list(range(0, len(events), 100))) == Usage(1, 2 * KEYS_MAX - 1, None)


def test_an_object_that_is_too_long_is_no_usage_in_one_piece_or_several() -> None:
    data = b'{"usage":{"prompt_tokens":1,"x":"%b","completion_tokens":2}}' % (b"y" * USAGE_BYTES_MAX)
    assert feed(data, []) is feed(data, [100, 3000]) is None


def test_an_answer_without_usage_has_none() -> None:
    assert feed(b'data: {"choices":[]}\n\ndata: [DONE]\n\n', [3, 9]) is None


def test_an_endless_usage_object_costs_bounded_memory() -> None:
    scanner = UsageScanner()
    scanner.feed(b'{"usage": {"a": "')
    for _ in range(100):
        scanner.feed(b"x" * 1000)
    assert scanner.usage is None
    assert len(scanner._open or b"") <= USAGE_BYTES_MAX


class Read:
    """A pattern that counts the bytes that it reads."""

    def __init__(self, pattern: re.Pattern[bytes], seen: list[int]) -> None:
        self._pattern = pattern
        self._seen = seen

    def match(self, data: bytes, at: int, end: int) -> Any:
        self._seen.append(end - at)
        return self._pattern.match(data, at, end)

    def finditer(self, data: bytes, at: int, end: int) -> Any:
        self._seen.append(end - at)
        return self._pattern.finditer(data, at, end)


@pytest.mark.parametrize("scanner", [UsageScanner, SglangScanner, HttpBodyScanner])
@pytest.mark.parametrize("inside", [b"{", b'"', b'"":{', b'"' + b"a" * 5000, b'"' + b"\\a" * 5000, b" "])
def test_an_object_that_comes_byte_by_byte_is_read_once(scanner: type[Any], inside: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(usage, "_TOKENS", Read(usage._TOKENS, seen))
    monkeypatch.setattr(usage, "_QUOTED", Read(usage._QUOTED, seen))
    reader = scanner()
    data = b'{"usage":{"meta_info":{' + (inside * 5000)[:5000]
    for byte in data:
        piece = bytes((byte,))
        reader.feed(frame(field(2, piece)) if scanner is HttpBodyScanner else piece)
    assert sum(seen) < 3 * len(data)


def test_blanks_around_a_colon_are_limited() -> None:
    def spaced(before: int, after: int) -> bytes:
        return b'{"usage"%b:%b{"prompt_tokens":1}}' % (b" " * before, b"\n" * after)

    for blanks in ((BLANKS_MAX - 1, BLANKS_MAX - 1), (0, BLANKS_MAX - 1)):
        data = spaced(*blanks)
        assert feed(data, []) == feed(data, list(range(len(data)))) == Usage(1, None, None)
    for blanks in ((2 * BLANKS_MAX, 0), (0, 2 * BLANKS_MAX)):
        data = spaced(*blanks)
        assert feed(data, []) is feed(data, list(range(len(data)))) is None


@given(st.lists(st.binary(max_size=50), max_size=30))
def test_arbitrary_bytes_are_harmless(chunks: list[bytes]) -> None:
    scanner = UsageScanner()
    for chunk in chunks:
        scanner.feed(chunk)
        scanner.feed(b'"usage"')
    assert scanner.usage is None


# Other APIs.

ANTHROPIC = json.dumps(
    {"type": "message", "content": [], "usage": {"input_tokens": 7, "cache_read_input_tokens": 4, "output_tokens": 7}}
).encode()
ANTHROPIC_SSE = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"1","usage":{"input_tokens":5,"cache_creation_input_tokens":2,'
    b'"cache_read_input_tokens":4,"output_tokens":1}}}\n\n'
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"\\"usage\\":{\\"output_tokens\\":99}"}}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","delta":{},"usage":{"output_tokens":7}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)
SGLANG = (
    b'{"text":"x","meta_info":{"id":"1","finish_reason":{"type":"length","length":7},"prompt_tokens":11,'
    b'"completion_tokens":7,"cached_tokens":4}}'
)
SGLANG_SSE = (
    b'data: {"text":"a","meta_info":{"id":"1","finish_reason":null,"prompt_tokens":11,"completion_tokens":1,"cached_tokens":4}}\n\n'
    b'data: {"text":"\\"meta_info\\":{}","meta_info":{"id":"}","finish_reason":{"type":"stop","matched":2},"prompt_tokens":11,'
    b'"completion_tokens":7,"cached_tokens":4}}\n\n'
    b"data: [DONE]\n\n"
)


def generated(kind: int, *numbers: int) -> bytes:
    """GenerateResponse: kind 1 is a chunk with numbers from field 2 on, kind 2 is complete with numbers from field 3 on."""
    tokens = packed(1, [1, 2, 300])
    return frame(field(kind, tokens + b"".join(field(kind + 1 + n, number) for n, number in enumerate(numbers))))


VLLM_GRPC = generated(2, 11, 7, 4)
VLLM_GRPC_STREAM = frame(field(1, packed(1, [5]))) + generated(1, 11, 6, 4) + frame(b"\xff\xff") + generated(1, 11, 7, 4)
VERTEX = frame(field(1, "application/json") + field(2, PLAIN))
VERTEX_STREAM = frame(field(2, SSE[:100])) + frame(field(2, SSE[100:]))
OTHERS = [
    (AnthropicScanner, ANTHROPIC),
    (AnthropicScanner, ANTHROPIC_SSE),
    (SglangScanner, SGLANG),
    (SglangScanner, SGLANG_SSE),
    (VllmGenerateScanner, VLLM_GRPC),
    (VllmGenerateScanner, VLLM_GRPC_STREAM),
    (HttpBodyScanner, VERTEX),
    (HttpBodyScanner, VERTEX_STREAM),
]


def read(scanner: Scanner, data: bytes, cuts: list[int]) -> Usage | None:
    """Feeds a scanner like the server, which skips chunks where that is allowed."""
    borders = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for a, b in itertools.pairwise(borders):
        chunk = data[a:b]
        if scanner.pending or KEY in chunk or (chunk and chunk[-1] in SUSPECT):
            scanner.feed(chunk)
    return scanner.usage


@pytest.mark.parametrize(("scanner", "data"), OTHERS)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=60))
def test_usage_of_other_apis_is_found_whatever_the_chunk_borders(scanner: type[Any], data: bytes, cuts: list[int]) -> None:
    assert read(scanner(), data, cuts) == Usage(11, 7, 4)


@pytest.mark.parametrize(("scanner", "data"), OTHERS)
def test_usage_of_other_apis_is_found_byte_by_byte(scanner: type[Any], data: bytes) -> None:
    assert read(scanner(), data, list(range(len(data)))) == Usage(11, 7, 4)


@pytest.mark.parametrize("data", [PLAIN, SSE, RESPONSES])
@given(cuts=st.lists(st.integers(0, 10_000), max_size=60))
def test_skipped_chunks_hold_no_part_of_the_usage(data: bytes, cuts: list[int]) -> None:
    assert read(UsageScanner(), data, cuts) == Usage(11, 7, 4)


def test_the_usage_of_a_truncated_answer_is_what_was_reported_so_far() -> None:
    assert read(AnthropicScanner(), ANTHROPIC_SSE[:200], []) == Usage(11, 1, 4)
    assert read(SglangScanner(), SGLANG_SSE[:150], []) is None
    assert read(VllmGenerateScanner(), VLLM_GRPC_STREAM[:-1], []) == Usage(11, 6, 4)


@pytest.mark.parametrize(
    ("reported", "usage"),
    [
        # vLLM, for a prompt of 152 tokens of which one block of 128 was cached
        ({"input_tokens": 24, "output_tokens": 8, "cache_read_input_tokens": 128}, Usage(152, 8, 128)),
        ({"input_tokens": 24, "output_tokens": 8, "cache_creation_input_tokens": 100}, Usage(124, 8, None)),
        ({"input_tokens": 24, "output_tokens": 8, "cache_read_input_tokens": None}, Usage(24, 8, None)),
        ({"output_tokens": 8, "cache_read_input_tokens": 128}, Usage(None, 8, 128)),
        ({"input_tokens": 2**32 - 1, "output_tokens": 8, "cache_read_input_tokens": 9}, Usage(2**32 - 1, 8, 9)),
    ],
)
def test_anthropics_prompt_is_what_was_computed_read_from_the_cache_and_written_to_it(
    reported: dict[str, int | None], usage: Usage
) -> None:
    assert read(AnthropicScanner(), json.dumps({"usage": reported}).encode(), []) == usage


COUNTS = st.integers(0, TOKENS_MAX)
FIGURES = st.none() | COUNTS | st.sampled_from([-1, TOKENS_MAX + 1, 10**400, 1.5, True, "many", [], [1], {}, {"type": "integer"}])


def known(figure: object) -> int | None:
    return figure if type(figure) is int and 0 <= figure <= TOKENS_MAX else None


@given(prompt=FIGURES, completion=FIGURES, cached=FIGURES)
@example(prompt=11, completion=7, cached=-1)  # vLLM, if it did not count the cached tokens
def test_a_figure_that_is_no_count_leaves_only_itself_unknown(prompt: object, completion: object, cached: object) -> None:
    openai = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": {"cached_tokens": cached}}
    figures = known(prompt), known(completion), known(cached)
    reported = Usage(*figures) if figures[:2] != (None, None) else None
    assert read(UsageScanner(), json.dumps({"usage": openai}).encode(), []) == reported
    sglang = {"prompt_tokens": prompt, "completion_tokens": completion, "cached_tokens": cached}
    of_sglang = reported and Usage(reported.prompt or 0, reported.completion or 0, reported.cached)
    assert read(SglangScanner(), json.dumps({"meta_info": sglang}).encode(), []) == of_sglang
    anthropic = {"input_tokens": prompt, "output_tokens": completion, "cache_read_input_tokens": cached}
    whole = None if figures[0] is None else min(figures[0] + (figures[2] or 0), TOKENS_MAX)
    of_anthropic = Usage(whole, *figures[1:]) if any(figure is not None for figure in figures) else None
    assert read(AnthropicScanner(), json.dumps({"usage": anthropic}).encode(), []) == of_anthropic


@pytest.mark.parametrize("details", [b"[]", b'"none"', b"-1", b"true"])
def test_details_that_are_no_object_leave_only_the_cached_tokens_unknown(details: bytes) -> None:
    answer = b'{"usage":{"prompt_tokens":11,"completion_tokens":7,"prompt_tokens_details":%b}}' % details
    assert read(UsageScanner(), answer, []) == Usage(11, 7, None)


def test_embeddings_over_grpc_report_their_prompt() -> None:
    answer = frame(field(1, b"\0" * 64) + field(2, 11) + field(3, 16))
    assert read(VllmEmbedScanner(), answer, []) == Usage(11, 0, None)
    assert read(VllmEmbedScanner(), frame(field(3, 16)), []) is None


def test_zero_or_missing_numbers_are_no_usage_over_grpc() -> None:
    assert read(VllmGenerateScanner(), generated(1) + generated(2, 0, 0, 4), []) is None


def test_a_request_can_mark_its_answer_as_not_to_be_read() -> None:
    request = Request(id="r", path="/", headers={}, now=0.0)
    assert request[ANSWER] is None
    request[ANSWER] = UNSEEN
    assert request[ANSWER] == AnswerHandling(None, skip=True)


@pytest.mark.parametrize("scanner", [AnthropicScanner, SglangScanner, VllmGenerateScanner, VllmEmbedScanner, HttpBodyScanner])
@given(chunks=st.lists(st.binary(max_size=50), max_size=20))
def test_arbitrary_answers_are_harmless(scanner: type[Any], chunks: list[bytes]) -> None:
    found = scanner()
    for chunk in chunks:
        found.feed(chunk)
        found.feed(b'"usage":{"input_tokens":"x"}"meta_info":{"prompt_tokens":[]}')


@given(name=st.text(st.sampled_from('a"\\{}'), max_size=12), cuts=st.lists(st.integers(0, 10_000), max_size=10))
def test_strings_inside_the_object_may_contain_anything(name: str, cuts: list[int]) -> None:
    usage = {"tier": {name: name}, "prompt_tokens": 11, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
    assert feed(json.dumps({"usage": usage}).encode(), cuts) == Usage(11, 7, 4)
