"""What stands between the pipeline and a plugin's calls.

`scorer` and `mask` hold foreign plugins to their promise (scores in [0, 1], a boolean for each candidate; our own are held to it by
the contract tests, and pay nothing). `Wrap` is how others look at calls: durations, traces, explanations each bring one, and no call
pays for those that are not there.
"""

import enum
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from epp.candidates import Candidates, Mask, Scores
from epp.errors import PluginFault
from epp.plugin import Plugin, Profile, Scorer, ScorerCall, foreign
from epp.request import Request

C = TypeVar("C", bound=Callable[..., Any])


class Point(enum.Enum):
    """Where a call stands; the values are those of the label `extension_point` on the field's dashboards."""

    PARSER = "RequestParsing"
    REQUEST_HEADER = "RequestHeader"
    SCREENER = "Screener"
    PRODUCER = "DataProducer"
    ADMITTER = "Admission"
    PROFILE_PICKER = "ProfilePicker"
    PROFILES_RESULT = "ProcessProfilesResults"
    FILTER = "Filter"
    SCORER = "Scorer"
    PICKER = "Picker"
    PRE_REQUEST = "PreRequest"
    RESPONSE_RECEIVED = "ResponseReceived"
    RESPONSE_STREAMING = "ResponseStreaming"
    RESPONSE_COMPLETE = "ResponseComplete"


class Wrap(Protocol):
    """Offered every call of every plugin when a pipeline is compiled; returns what is to be called instead."""

    def __call__(self, point: Point, plugin: Plugin, call: C, /) -> C: ...


def bare(_point: Point, _plugin: Plugin, call: C, /) -> C:
    """The call as it is."""
    return call


def scorer(instance: Scorer) -> ScorerCall:
    """The bound `score`, clipped to [0, 1] with NaN as 0 and its shape checked unless it is one of ours."""
    score = instance.score
    if not foreign(type(instance)):
        return score

    def clipped(request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        given = score(request, candidates, profile)
        if given is None:
            return None
        scores = np.asarray(given, dtype=np.float64)
        if scores.shape != (len(candidates),):
            raise PluginFault(
                f"scorer '{instance.name}' returned shape {scores.shape} for {len(candidates)} candidates; return one score per candidate"
            )
        return np.minimum(np.fmax(scores, 0.0), 1.0)

    return clipped


def mask(instance: Plugin, call: Callable[..., Mask]) -> Callable[..., Mask]:
    """The bound `keep` or `screen`, with its mask checked unless it is one of ours: a list of rows would be taken for another choice."""
    if not foreign(type(instance)):
        return call

    def checked(request: Request, candidates: Candidates, *more: Any) -> Mask:
        given = np.asarray(call(request, candidates, *more))
        if given.dtype != np.bool_ or given.shape != (len(candidates),):
            raise PluginFault(
                f"'{instance.name}' returned shape {given.shape} of {given.dtype} for {len(candidates)} candidates; "
                "return one boolean per candidate"
            )
        return given

    return checked
