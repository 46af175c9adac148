"""Reads public traces of LLM traffic as arrivals with sizes. This is pure code: lines in, arrivals out.

    mooncake    JSON lines: timestamp (ms), input_length, output_length, hash_ids (blocks of 512 tokens)
    azure       CSV of the Azure LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens
    burstgpt    CSV: Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type
    vllm        JSON that `vllm bench serve --save-detailed` saves: input_lens, output_lens, start_times or ttfts
    llm-d       JSON lines of llm-d's and inference-perf's reports: start_time, end_time, input_tokens and output_tokens, maybe in `info`

A trace may be long, so arrivals come one by one, except those of vLLM's file, which is one JSON object. `detected` finds the format from
the first line. `BadTrace` says what is wrong with a trace: the line, the field, the expected value, and what to do.
"""

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from typing import Annotated, Any, Final, NamedTuple

import msgspec

FORMATS: Final = ("mooncake", "azure", "burstgpt", "vllm", "llm-d")
MOONCAKE_BLOCK_TOKENS: Final = 512
LINE_CHARS_MAX: Final = 8 << 20
WHOLE_CHARS_MAX: Final = 1 << 30
TOKENS_MAX: Final = 10_000_000  # tokens of a prompt or an answer
SHOWN_MAX: Final = 40

_BlockId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Arrival(NamedTuple):
    """One request of a trace. `at`: seconds from the first request. `blocks`: equal ids mean equal beginnings of prompts; empty if unknown.

    `block_tokens`: tokens per block; 0 if not known. `model`: empty if not known.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int] = ()
    block_tokens: int = 0
    model: str = ""


class BadTrace(Exception):
    """Says what is wrong with a trace, in which line, and what to do."""


class _Lines:
    """Yields the lines of a trace. `number`: the number of the last line, from 1 on."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        return line


def arrivals(lines: Iterable[str], format: str = "") -> Iterator[Arrival]:
    """Yields the requests of a trace in the order of its lines. `format`: one of FORMATS, or "" to detect the format by the first line.

    Raises BadTrace.
    """
    rest = _Lines(lines)
    first = next((line for line in rest if line.strip()), "")
    if not first:
        raise BadTrace("the trace is empty: is it the right file?")
    named = format or detected(first)
    found = _READERS[named](chain([first.lstrip("\ufeff")], rest))
    begin: float | None = None
    try:
        for arrival in found:
            begin = arrival.at if begin is None else begin
            yield arrival._replace(at=arrival.at - begin)
    except (KeyError, TypeError, ValueError, OverflowError, csv.Error) as wrong:
        where = "" if named == "vllm" else f"line {rest.number}: "
        fix = "correct the file" if named == "vllm" else "correct or delete the line"
        raise BadTrace(f"{where}not a trace of format {named}: {_why(wrong)}: {fix}") from wrong


def detected(first: str) -> str:
    """Returns the format of a trace, given its first line. Raises BadTrace."""
    lowered = first.lower()
    if "contexttokens" in lowered:
        return "azure"
    if "request tokens" in lowered:
        return "burstgpt"
    if lowered.lstrip("\ufeff").startswith("{"):
        if '"input_length"' in lowered:
            return "mooncake"
        return "llm-d" if '"start_time"' in lowered else "vllm"
    raise BadTrace(f"line 1: no known format: convert the file to one of {', '.join(FORMATS)}")


def _mooncake(lines: Iterator[str]) -> Iterator[Arrival]:
    for fields in _objects(lines):
        at = _time(fields, "timestamp") / 1000
        yield Arrival(at, _count(fields, "input_length"), _count(fields, "output_length"), _blocks(fields), MOONCAKE_BLOCK_TOKENS)


def _azure(lines: Iterator[str]) -> Iterator[Arrival]:
    for fields in csv.DictReader(lines):
        yield Arrival(_moment(fields, "TIMESTAMP"), _count(fields, "ContextTokens"), _count(fields, "GeneratedTokens"))


def _burstgpt(lines: Iterator[str]) -> Iterator[Arrival]:
    for fields in csv.DictReader(lines):
        tokens = _count(fields, "Request tokens"), _count(fields, "Response tokens")
        yield Arrival(_time(fields, "Timestamp"), *tokens, model=fields.get("Model") or "")


def _vllm(lines: Iterator[str]) -> Iterator[Arrival]:
    text, size = [], 0
    for line in lines:
        size += len(line)
        if size > WHOLE_CHARS_MAX:
            raise ValueError(f"the file has more than {WHOLE_CHARS_MAX} characters")
        text.append(line)
    fields = _object("".join(text), WHOLE_CHARS_MAX)
    inputs, outputs = fields["input_lens"], fields["output_lens"]
    rate = float(fields.get("request_throughput") or 0)
    starts = fields.get("start_times") or [number / rate if rate > 0 else 0.0 for number in range(len(inputs))]
    for at, prompt, output in sorted(zip(starts, inputs, outputs, strict=True)):
        one = {"start_times": at, "input_lens": prompt, "output_lens": output}
        tokens = _count(one, "input_lens"), _count(one, "output_lens")
        yield Arrival(_time(one, "start_times"), *tokens, model=str(fields.get("model_id") or ""))


def _llm_d(lines: Iterator[str]) -> Iterator[Arrival]:
    for fields in _objects(lines):
        info = fields.get("info") or fields
        tokens = _count(info, "input_tokens"), _count(info, "output_tokens")
        yield Arrival(_time(fields, "start_time"), *tokens, model=str(fields.get("model") or ""))


_READERS: Final = {"mooncake": _mooncake, "azure": _azure, "burstgpt": _burstgpt, "vllm": _vllm, "llm-d": _llm_d}


def _objects(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.strip():
            yield _object(line, LINE_CHARS_MAX)


def _object(text: str, chars_max: int) -> dict[str, Any]:
    if len(text) > chars_max:
        raise ValueError(f"{len(text)} characters, and at most {chars_max} are read")
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as wrong:
        raise ValueError(str(wrong)) from wrong


def _count(fields: Mapping[str, Any], name: str) -> int:
    """Returns a number of tokens. Raises ValueError, or KeyError if the field is missing."""
    try:
        number = int(fields[name])
    except (TypeError, ValueError, OverflowError):
        number = -1
    if not 0 <= number <= TOKENS_MAX:
        raise ValueError(f"{name} is {_shown(fields[name])}, not a number of tokens from 0 to {TOKENS_MAX}")
    return number


def _time(fields: Mapping[str, Any], name: str) -> float:
    """Returns a time in the unit of the format. Raises ValueError, or KeyError if the field is missing."""
    try:
        at = float(fields[name])
    except (TypeError, ValueError, OverflowError):
        at = math.nan
    if not math.isfinite(at):
        raise ValueError(f"{name} is {_shown(fields[name])}, not a time")
    return at


def _moment(fields: Mapping[str, Any], name: str) -> float:
    """Returns a date and time of day in seconds. Raises ValueError, or KeyError if the field is missing."""
    try:
        return datetime.fromisoformat(_microseconds(fields[name])).timestamp()
    except (AttributeError, ValueError, OverflowError) as wrong:
        raise ValueError(f"{name} is {_shown(fields[name])}, not a time such as 2023-11-16 18:15:46.68") from wrong


def _blocks(fields: Mapping[str, Any]) -> list[int]:
    """Returns the ids of the blocks of a prompt; empty if the field is missing. Raises ValueError."""
    try:
        return msgspec.convert(fields.get("hash_ids", ()), list[_BlockId])
    except msgspec.ValidationError as wrong:
        raise ValueError(f"hash_ids is {_shown(fields['hash_ids'])}, not a list of whole numbers from 0 on") from wrong


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…"


def _microseconds(text: str) -> str:
    """Shortens a timestamp to at most six digits of a second, because Azure's traces have seven."""
    whole, point, digits = text.strip().partition(".")
    return whole + (point + digits[:6].ljust(6, "0") if point else "")


def _why(wrong: Exception) -> str:
    return f"the field {wrong} is missing" if isinstance(wrong, KeyError) else str(wrong)
