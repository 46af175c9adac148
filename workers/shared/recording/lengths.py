"""Estimates the output tokens of recorded answers that report no usage. Most streamed answers report none, because few clients ask for it.

An engine sends a streamed answer as nearly one event per token. So the bytes of an answer hold about as many events as the answer has
tokens:

    tokens = bytes of the answer / bytes of an event

If at least KNOWN_MIN streamed answers of the same model report usage, the bytes of an event are the bytes per token of these answers.
Otherwise the bytes of an event are the bytes per message of the answers with the smallest messages: a gateway may put several events into
one message, but not one event into several.
"""

import statistics
from array import array
from collections import defaultdict
from typing import Final, NamedTuple

import numpy as np

from epp.recording.records import Ended

KNOWN_MIN: Final = 20
PIECES_MIN: Final = 8  # in a shorter answer, the first and last events have too large a share
SMALL: Final = 10  # the percentage of answers with smaller messages
EVENT_BYTES: Final = 220.0  # the size of a chunk of vLLM's chat completions, for recordings without numbers of messages


def is_streamed(ended: Ended) -> bool:
    """Returns whether this is a whole streamed answer."""
    return ended.streaming and ended.whole and ended.status == 200 and ended.answer_bytes > 0


class Told(NamedTuple):
    """A summary of the estimates. `answers`: the number of whole streamed answers. `estimated`: the number of these answers without usage.

    `off`: the median share by which the estimate misses the reported usage; None if too few answers report usage.
    """

    answers: int
    estimated: int
    off: float | None

    def __str__(self) -> str:
        accuracy = (
            "the error of this estimate is not known, because too few answers report usage"
            if self.off is None
            else f"off by {self.off:.0%} (median) where usage tells"
        )
        return (
            f"{self.estimated:,} of {self.answers:,} streamed answers report no usage: their output tokens are estimated from their bytes, "
            f"{accuracy}"
        )


class _Answers:
    """The streamed answers of one model: bytes and messages of each answer, and the reported tokens, or 0 if not reported."""

    def __init__(self) -> None:
        self.sizes, self.pieces, self.tokens = array("d"), array("d"), array("d")

    def event_bytes(self) -> float:
        sizes, pieces, tokens = (np.array(each) for each in (self.sizes, self.pieces, self.tokens))
        if (tokens > 0).sum() >= KNOWN_MIN:
            return float(np.median((sizes / np.maximum(tokens, 1))[tokens > 0]))
        long = pieces >= PIECES_MIN
        return float(np.percentile(sizes[long] / pieces[long], SMALL)) if long.any() else EVENT_BYTES

    def off(self, event_bytes: float) -> list[float]:
        """Returns the share by which the estimate misses each reported length."""
        sizes, tokens = np.array(self.sizes), np.array(self.tokens)
        known = tokens > 0
        off: list[float] = np.abs(sizes[known] / event_bytes / tokens[known] - 1).tolist()
        return off


class Lengths:
    """Collects whole streamed answers, and then estimates the lengths of the answers without usage."""

    def __init__(self) -> None:
        self._answers: dict[str, _Answers] = defaultdict(_Answers)
        self._event_bytes: dict[str, float] = {}

    def add(self, model: str, ended: Ended) -> None:
        """Adds a whole streamed answer."""
        of = self._answers[model]
        of.sizes.append(ended.answer_bytes)
        of.pieces.append(ended.pieces)
        of.tokens.append(ended.completion or 0)

    def told(self) -> Told:
        """Decides the bytes of an event for each model. Returns a summary of the estimates and their error."""
        off: list[float] = []
        answers = estimated = 0
        for model, of in self._answers.items():
            size = self._event_bytes[model] = of.event_bytes()
            off += of.off(size)
            answers += len(of.tokens)
            estimated += sum(not tokens for tokens in of.tokens)
        return Told(answers, estimated, statistics.median(off) if len(off) >= KNOWN_MIN else None)

    def output(self, model: str, answer_bytes: int) -> int:
        """Estimates the output tokens of a whole streamed answer. Call `told` before."""
        return max(round(answer_bytes / self._event_bytes[model]), 1)
