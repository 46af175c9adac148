"""Mutated configurations: each is loaded, or refused with places, in bounded time, and raises nothing else.

The seed is fixed, so that a failure is reproducible.
"""

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from epp.config import registry
from epp.config.load import DEFAULT_TEXT, ConfigErrors, load
from tests.examples import number

COUNT = number(3000)
CPU_S_MAX = 2.0  # for one document; the usual time is some milliseconds
DEPLOY = Path(__file__).parents[2] / "deploy" / "config"

EVERYTHING = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [haPopulateNonLeaderDatastore=true]
plugins:
- {type: file-discovery, name: endpoints, parameters: {path: e.yaml, watchFile: true}}
- {type: metrics-data-source, parameters: &source {scheme: https, path: /m, port: 8000, interval: 50ms}}
- {type: core-metrics-extractor, parameters: {defaultEngine: vllm}}
- {type: prefix-cache-scorer, parameters: {matchLengthWeight: 0.5, matchLengthScaleTokens: 100}}
- {type: approx-prefix-cache-producer, parameters: {blockSizeTokens: 64}}
- {type: tests.epp.config_plugins:Strict, name: strict, parameters: {fileName: x, conditions: [{maxValue: 1}], labels: {a: b}}}
- type: queue-scorer
- type: weighted-random-picker
schedulingProfiles:
- name: a
  plugins:
  - {pluginRef: strict}
  - {pluginRef: prefix-cache-scorer, weight: 1}
  - {pluginRef: queue-scorer, weight: 2.5}
- {name: b, shadow: true, plugins: [{pluginRef: queue-scorer}]}
dataLayer:
  discovery: {pluginRef: endpoints}
  sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}]}]
flowControl:
  maxBytes: 1Gi
  maxRequests: 1k
  defaultRequestTTL: 1m30s
  priorityBands: [{priority: 5, maxRequests: 100, fairnessPolicyRef: x}, &band {priority: -1}]
  defaultPriorityBand: {<<: *band, maxBytes: 500M}
requestHandler: {parsers: [{pluginRef: openai-parser}, {pluginRef: passthrough-parser}]}
"""
PIECES = (
    "", " ", "\n", "\n  ", "\t", ":", ": ", "- ", "{", "}", "[", "]", ",", "null", "~", "true", "0", "-1", "1e999", ".inf", "0x", "'",
    '"', "&a ", "*a", "*band", "<<: *band", "<<: *source", "!!int ", "!!python/object:x ", "#", "---\n", "...\n", "%YAML 1.1\n", "|", ">",
    "\x00", "\ufeff", "\u2028", "é", "𝒳", "? ", "a" * 300, "9" * 40, "[" * 80, "{a: " * 80, "pluginRef", "type: a", "shadow: true",
    "parameters: {a: [1, {b: 2}]}", "tests.epp:x", "tests.epp.config_plugins:Pong", "precise-prefix-cache-scorer",
)  # fmt: skip


def cut(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + text[at + rng.randrange(1, 30) :]


def put(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(PIECES) + text[at:]


def change(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + chr(rng.choice((rng.randrange(32, 127), rng.randrange(0xD7FF)))) + text[at + 1 :]


def repeat(rng: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True) or ["\n"]
    at = rng.randrange(len(lines))
    return "".join(lines[:at] + lines[at : at + rng.randrange(1, 4)] * rng.randrange(2, 5) + lines[at:])


def swap(rng: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True) or ["\n"]
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return "".join(lines)


def indent(rng: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True) or ["\n"]
    at = rng.randrange(len(lines))
    lines[at] = "  " + lines[at] if rng.random() < 0.5 else lines[at].removeprefix("  ")
    return "".join(lines)


MUTATIONS: tuple[Callable[[random.Random, str], str], ...] = (cut, put, change, repeat, swap, indent)


@pytest.fixture
def cpu_bound() -> Iterator[Callable[[], None]]:
    """A call that starts the timer for one document; when the time is over, the test fails."""

    def over(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"a document took more than {CPU_S_MAX} s")

    before = signal.signal(signal.SIGVTALRM, over)
    yield lambda: signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S_MAX)  # type: ignore[func-returns-value]
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


@pytest.mark.timeout(600)
def test_mutated_documents_are_loaded_or_refused_with_places(cpu_bound: Callable[[], None]) -> None:
    registry.known()
    rng = random.Random(20)
    documents = [EVERYTHING, DEFAULT_TEXT, *(path.read_text() for path in sorted(DEPLOY.glob("*.yaml")))]
    assert load(EVERYTHING, "c.yaml", allow_experimental=True).pipeline.shadows
    refused = 0
    for _ in range(COUNT):
        text = rng.choice(documents)
        for _ in range(rng.randrange(1, 6)):
            text = rng.choice(MUTATIONS)(rng, text)
        cpu_bound()
        try:
            load(text, "c.yaml", allow_experimental=True)
        except ConfigErrors as errors:
            refused += 1
            assert errors.errors
            last = len(text.splitlines()) + 2
            assert all(0 <= error.line <= last and error.message for error in errors.errors), text
    assert COUNT // 5 < refused < COUNT  # some mutations stay valid, many do not
