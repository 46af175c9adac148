"""Prefer endpoints that are labelled for the prompt's length: `llm-d.ai/context-length-range: 0-8192`."""

import re
from typing import Annotated

import msgspec
import numpy as np

from epp.candidates import Candidates, EndpointList, Floats, Mask, Scores
from epp.plugin import Filter, Profile, Scorer, plugin
from epp.request import Request
from epp.request.tokens import TOKENS, token_count

LABEL = "llm-d.ai/context-length-range"
NEUTRAL = 0.5
OUTSIDE_MAX = 0.3  # endpoints with the prompt out of their range score at most this; all others score more
WIDTH_SHARE, ROOM_SHARE = 0.7, 0.3
WIDTH_SCALE, DISTANCE_SCALE = 10_000.0, 1_000.0

_RANGE = re.compile(r"\s*([0-9]{1,15})\s*-\s*([0-9]{1,15})\s*")


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which label has the lengths, and whether the plugin drops endpoints as a filter.

    label: The label with the range of prompt lengths, in tokens, that an endpoint is meant for.
    enable_filtering: As a filter, drop endpoints whose range does not contain the prompt's length; otherwise the filter keeps all.
    """

    label: Annotated[str, msgspec.Meta(min_length=1)] = LABEL
    enable_filtering: bool = False


class Ranges:
    """Holds the ranges in the labels of one endpoint list as arrays. A prompt of n tokens in the range scores base + slope * (high - n).

    For an endpoint without the label every prompt is in range, with the score NEUTRAL. For an endpoint with an invalid label every prompt
    is out of range, at an infinite distance.
    """

    __slots__ = ("base", "endpoint_list", "high", "low", "slope")

    def __init__(self, endpoint_list: EndpointList, label: str) -> None:
        self.endpoint_list = endpoint_list
        rows = [_row(endpoint.labels.get(label)) for endpoint in endpoint_list.endpoints]
        self.low, self.high, self.base, self.slope = np.array(rows, dtype=np.float64).reshape(-1, 4).T.copy()

    def distance(self, tokens: int) -> Floats:
        """Returns by how many tokens a prompt of this length is outside each endpoint's range; 0 or less if it is in the range."""
        return np.maximum(tokens - self.high, self.low - tokens)


def _row(label: str | None) -> tuple[float, float, float, float]:
    if label is None:
        return -np.inf, float(2**62), NEUTRAL, 0.0
    match = _RANGE.fullmatch(label)
    low, high = (float(match[1]), float(match[2])) if match else (1.0, 0.0)
    if low > high:
        return np.inf, 0.0, 0.0, 0.0
    width = high - low
    if width == 0.0:
        return low, high, 1.0, 0.0
    raised = 1.0 - OUTSIDE_MAX
    base = OUTSIDE_MAX + raised * WIDTH_SHARE / (1.0 + width / WIDTH_SCALE)
    return low, high, base, raised * ROOM_SHARE / width


@plugin("context-length-aware")
class ContextLength(Filter, Scorer):
    """Scores endpoints by how well the prompt's length fits the range in their label, `min-max`.

    For n prompt tokens and a range of width w = max - min:

    in range:      0.3 + 0.7 * (0.7 / (1 + w / 10000) + 0.3 * (max - n) / w); 1 if w = 0
    out of range:  0.3 / (1 + distance / 1000)

    `distance` says by how many tokens the prompt is outside the range. An endpoint without the label scores 0.5, an endpoint with an
    invalid label 0. As a filter, with `enableFiltering`, this plugin keeps endpoints with the prompt in their range, and endpoints without
    the label.
    """

    Params = Parameters
    optional = (TOKENS,)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._label = params.label
        self._filters = params.enable_filtering
        self._ranges = Ranges(EndpointList(()), params.label)

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        if not self._filters:
            return np.ones(len(candidates), dtype=bool)
        distance = self._of(candidates).distance(token_count(request))
        inside: Mask = candidates.narrow(distance) <= 0.0
        return inside

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        tokens = token_count(request)
        ranges = self._of(candidates)
        distance = ranges.distance(tokens)
        inside = ranges.base + ranges.slope * (ranges.high - tokens)
        outside = OUTSIDE_MAX * DISTANCE_SCALE / (DISTANCE_SCALE + np.abs(distance))
        scores: Scores = np.where(distance <= 0.0, inside, outside)
        return candidates.narrow(scores)

    def _of(self, candidates: Candidates) -> Ranges:
        endpoint_list = candidates.snapshot.endpoint_list
        if endpoint_list is not self._ranges.endpoint_list:
            self._ranges = Ranges(endpoint_list, self._label)
        return self._ranges
