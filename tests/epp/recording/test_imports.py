"""Public trace formats, as small samples of the same shape."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.recording.imports import FORMATS, Arrival, BadTrace, arrivals
from tests.cases import cases

MOONCAKE = """\
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47, 2353]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
"""
VLLM = '{"model_id": "m", "request_throughput": 2.0, "input_lens": [100, 200], "output_lens": [10, 20], "ttfts": [0.1, 0.2]}'
VLLM_STARTS = '{"model_id": "m", "start_times": [9.5, 8.0], "input_lens": [100, 200], "output_lens": [10, 20]}'
LLM_D = """\
{"start_time": 100.5, "end_time": 101.0, "request": "…", "info": {"input_tokens": 50, "output_tokens": 7}}

{"start_time": 102.0, "end_time": 104.0, "model": "m", "input_tokens": 60, "output_tokens": 8}
"""


def read(text: str, format: str = "") -> list[Arrival]:
    return list(arrivals(text.splitlines(keepends=True), format))


def test_mooncake_has_milliseconds_and_blocks_of_512_tokens() -> None:
    first, second = read(MOONCAKE)
    assert first == Arrival(0.0, 6955, 52, [46, 47, 48], 512)
    assert second.at == pytest.approx(3.053) and second.blocks == [46, 47, 2353]


def test_azure_has_timestamps_of_seven_digits() -> None:
    first, second = read("\ufeff" + AZURE)
    assert first == Arrival(0.0, 374, 44)
    assert second.at == pytest.approx(4.314579, abs=1e-6) and second.prompt_tokens == 396


def test_burstgpt_has_seconds_and_models() -> None:
    assert read(BURSTGPT) == [Arrival(0.0, 472, 18, model="ChatGPT"), Arrival(40.0, 1087, 230, model="GPT-4")]


def test_vllm_has_start_times_or_a_rate() -> None:
    assert [(a.at, a.prompt_tokens) for a in read(VLLM)] == [(0.0, 100), (0.5, 200)]
    assert [(a.at, a.prompt_tokens) for a in read(VLLM_STARTS)] == [(0.0, 200), (1.5, 100)]


def test_llm_d_has_tokens_in_a_field_of_their_own_or_not() -> None:
    assert read(LLM_D) == [Arrival(0.0, 50, 7), Arrival(1.5, 60, 8, model="m")]


@cases(
    ("text", "why"),
    [
        ("", "the trace is empty"),
        ("hello\n", "no known format: convert the file to one of mooncake"),
        ('{"timestamp": 1, "input_length": 5}\n', "line 1: .* 'output_length' is missing: correct or delete the line"),
        ('{"input_length": -5, "output_length": 1, "timestamp": 1}\n', "line 1: .* input_length is -5, not a number of tokens from 0 to"),
        (MOONCAKE + "{", "line 3: .* truncated"),
        (MOONCAKE + MOONCAKE.replace("26", "9e99"), "line 4: .* output_length is 9e"),
        (MOONCAKE.replace("46", "-46"), r"line 1: .* hash_ids is \[-46, 47, 48\], not a list of whole numbers"),
        (MOONCAKE.replace("[46, 47, 48]", '"abc"'), "line 1: .* hash_ids is 'abc'"),
        (AZURE + "yesterday,1,2\n", "line 4: .* TIMESTAMP is 'yesterday', not a time such as 2023"),
        (AZURE + "2023-11-16 18:15:50.99,5\n", "line 4: .* GeneratedTokens is None"),
        (BURSTGPT.replace("45", "nan"), "line 3: .* Timestamp is 'nan', not a time"),
        (VLLM.replace("200", '"many"'), "input_lens is 'many', .*: correct the file"),
        ('{"start_time": 1, "input_tokens": 1, "output_tokens": "' + "x" * 99 + '"}', "line 1: .* output_tokens is 'x{39}…,"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line_the_field_and_what_to_do(text: str, why: str) -> None:
    with pytest.raises(BadTrace, match=why):
        read(text)


@given(text=st.text(), format=st.sampled_from(("", *FORMATS)))
def test_no_text_raises_anything_but_bad_trace(text: str, format: str) -> None:
    with suppress(BadTrace):
        read(text, format)


@given(begin=st.sampled_from((MOONCAKE, AZURE, BURSTGPT, VLLM, LLM_D)), data=st.data())
def test_a_damaged_trace_raises_nothing_but_bad_trace(begin: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(begin) - 1))
    with suppress(BadTrace):
        read(begin[:at] + data.draw(st.text(max_size=3)) + begin[at + 1 :])
