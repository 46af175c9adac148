"""Measures the load of a trace, for `epp size --trace`."""

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from epp.recording.imports import Arrival
from epp.request import BYTES_PER_TOKEN

BUSY_S: Final = 60  # the load is that of the busiest minute
KB: Final = 1000
ENVELOPE_BYTES: Final = 200  # bytes of a request's JSON besides its prompt


class TraceLoad(NamedTuple):
    """The load of the busiest minute of a trace. `rps`: requests per second. `prompt_kb`: mean KB of a body. `chunk_rate`: per second.

    `requests`: the requests of the whole trace, which lasts `seconds`.
    """

    rps: float
    prompt_kb: float
    chunk_rate: float
    requests: int
    seconds: float


def load_of(arrivals: Iterable[Arrival]) -> TraceLoad:
    """Measures the load, with one chunk per token of the answers. A trace without requests has the load 0."""
    counts: Counter[int] = Counter()
    outputs: Counter[int] = Counter()
    first, last, prompt_tokens = float("inf"), float("-inf"), 0
    for arrival in arrivals:
        minute = int(arrival.at // BUSY_S)
        counts[minute] += 1
        outputs[minute] += arrival.output_tokens
        prompt_tokens += arrival.prompt_tokens
        first, last = min(first, arrival.at), max(last, arrival.at)
    requests = counts.total()
    if not requests:
        return TraceLoad(0.0, 0.0, 0.0, 0, 0.0)
    seconds = last - first
    busy_s = min(BUSY_S, max(seconds, 1.0))  # a short trace has no whole minute
    body_bytes = prompt_tokens / requests * BYTES_PER_TOKEN + ENVELOPE_BYTES
    return TraceLoad(max(counts.values()) / busy_s, body_bytes / KB, max(outputs.values()) / busy_s, requests, seconds)
