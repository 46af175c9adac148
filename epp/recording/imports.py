"""Reads public traces of LLM traffic as arrivals with sizes. Pure code: lines in, arrivals out.

    mooncake    JSON lines: timestamp (ms), input_length, output_length, hash_ids (blocks of 512 tokens)
    azure       CSV of the Azure LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens
    burstgpt    CSV: Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type
    vllm        JSON that `vllm bench serve --save-detailed` saves: input_lens, output_lens, start_times or ttfts
    llm-d       JSON lines of llm-d's and inference-perf's reports: start_time, end_time, input_tokens and output_tokens, maybe in `info`

A trace may be long, so arrivals come one by one, except those of vLLM's file, which is one JSON object. `detected` finds the format from
the first line.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec

FORMATS: Final = ("mooncake", "azure", "burstgpt", "vllm", "llm-d")
MOONCAKE_BLOCK_TOKENS: Final = 512
LINE_CHARS_MAX: Final = 8 << 20
WHOLE_CHARS_MAX: Final = 1 << 30


class Arrival(NamedTuple):
    """One request of a trace. `at`: seconds from the first one. `blocks`: equal ids are equal beginnings of prompts; empty: not known.

    `block_tokens`: tokens per block; 0: not known. `model`: empty: not known.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int] = ()
    block_tokens: int = 0
    model: str = ""


class BadTrace(Exception):
    """Says what is wrong with a trace, and in which line."""


def arrivals(lines: Iterable[str], format: str = "") -> Iterator[Arrival]:
    """Yields the requests of a trace in the order of its lines. `format`: one of FORMATS; "": found from the first line.

    Raises BadTrace.
    """
    rest = iter(lines)
    first = next((line for line in rest if line.strip()), "")
    if not first:
        raise BadTrace("line 1: the trace is empty")
    named = format or detected(first)
    found = _READERS[named](chain([first.lstrip("\ufeff")], rest))
    begin: float | None = None
    try:
        for arrival in found:
            begin = arrival.at if begin is None else begin
            yield arrival._replace(at=arrival.at - begin)
    except (KeyError, TypeError, ValueError, OverflowError, csv.Error) as wrong:
        raise BadTrace(f"not a trace of format {named}: {_why(wrong)}") from wrong


def detected(first: str) -> str:
    """Returns the format of the trace whose first line this is. Raises BadTrace."""
    lowered = first.lower()
    if "contexttokens" in lowered:
        return "azure"
    if "request tokens" in lowered:
        return "burstgpt"
    if lowered.lstrip("\ufeff").startswith("{"):
        if '"input_length"' in lowered:
            return "mooncake"
        return "llm-d" if '"start_time"' in lowered else "vllm"
    raise BadTrace(f"line 1: no known format; give one of {', '.join(FORMATS)}")


def _mooncake(lines: Iterator[str]) -> Iterator[Arrival]:
    for fields in _objects(lines):
        blocks = [int(block) for block in fields.get("hash_ids", ())]
        at = float(fields["timestamp"]) / 1000
        yield Arrival(at, _count(fields["input_length"]), _count(fields["output_length"]), blocks, MOONCAKE_BLOCK_TOKENS)


def _azure(lines: Iterator[str]) -> Iterator[Arrival]:
    for fields in csv.DictReader(lines):
        at = datetime.fromisoformat(_microseconds(fields["TIMESTAMP"])).timestamp()
        yield Arrival(at, _count(fields["ContextTokens"]), _count(fields["GeneratedTokens"]))


def _burstgpt(lines: Iterator[str]) -> Iterator[Arrival]:
    for fields in csv.DictReader(lines):
        tokens = _count(fields["Request tokens"]), _count(fields["Response tokens"])
        yield Arrival(float(fields["Timestamp"]), *tokens, model=fields.get("Model") or "")


def _vllm(lines: Iterator[str]) -> Iterator[Arrival]:
    text, size = [], 0
    for line in lines:
        size += len(line)
        if size > WHOLE_CHARS_MAX:
            raise ValueError(f"the file has more than {WHOLE_CHARS_MAX} characters")
        text.append(line)
    fields = _object("".join(text), 1)
    inputs, outputs = fields["input_lens"], fields["output_lens"]
    rate = float(fields.get("request_throughput") or 0)
    starts = fields.get("start_times") or [number / rate if rate > 0 else 0.0 for number in range(len(inputs))]
    for at, prompt, output in sorted(zip(starts, inputs, outputs, strict=True)):
        yield Arrival(float(at), _count(prompt), _count(output), model=str(fields.get("model_id") or ""))


def _llm_d(lines: Iterator[str]) -> Iterator[Arrival]:
    for fields in _objects(lines):
        info = fields.get("info") or fields
        yield Arrival(
            float(fields["start_time"]), _count(info["input_tokens"]), _count(info["output_tokens"]), model=str(fields.get("model") or "")
        )


_READERS: Final = {"mooncake": _mooncake, "azure": _azure, "burstgpt": _burstgpt, "vllm": _vllm, "llm-d": _llm_d}


def _objects(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _object(line, number)


def _object(text: str, line: int) -> dict[str, Any]:
    if len(text) > max(LINE_CHARS_MAX, WHOLE_CHARS_MAX if line == 1 else 0):
        raise ValueError(f"line {line} has {len(text)} characters")
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as wrong:
        raise ValueError(f"line {line}: {wrong}") from wrong


def _count(value: Any) -> int:
    """Returns a number of tokens. Raises ValueError if it is negative."""
    number = int(value)
    if number < 0:
        raise ValueError(f"{number} tokens")
    return number


def _microseconds(text: str) -> str:
    """Returns a timestamp with at most six digits of a second: Azure's traces have seven."""
    whole, point, digits = text.strip().partition(".")
    return whole + (point + digits[:6].ljust(6, "0") if point else "")


def _why(wrong: Exception) -> str:
    return f"the field {wrong} is missing" if isinstance(wrong, KeyError) else str(wrong)
