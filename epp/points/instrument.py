"""Wraps calls of plugins (their bound methods) for the pipeline: to check results, or to observe calls.

`scorer`, `mask` and RESULT_CHECKS enforce the contract of foreign plugins: scores in [0, 1], one boolean per candidate, headers that
can be sent. Results of shipped plugins are not checked here, because contract tests check them. `Wrap` is the hook to observe calls.
"""

import enum
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from epp.candidates import Candidates, Mask, Scores
from epp.decision.decision import Decision, Response
from epp.errors import PluginFault
from epp.plugin import Plugin, Profile, Scorer, ScorerCall, foreign
from epp.request import Request

CLIPPED: Final = "clipped"
C = TypeVar("C", bound=Callable[..., Any])

_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


class Point(enum.Enum):
    """Names the extension point of a call. The values are those of the label `extension_point` in the reference picker's dashboards."""

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
    """A function from each call (bound method) of each plugin to the call to use instead, applied when a pipeline is compiled."""

    def __call__(self, point: Point, plugin: Plugin, call: C, /) -> C: ...


def bare(_point: Point, _plugin: Plugin, call: C, /) -> C:
    """A `Wrap` that returns each call unchanged."""
    return call


def scorer(instance: Scorer) -> ScorerCall:
    """Returns the bound `score`. For a foreign scorer the shape is checked, values are clipped to [0, 1], and NaN becomes 0.

    Once it has clipped a score, the returned call has the attribute CLIPPED, which `epp.points.guard` reads.
    """
    score = instance.score
    if not foreign(type(instance)):
        return score

    def clipped(request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        result = score(request, candidates, profile)
        if result is None:
            return None
        try:
            scores = np.asarray(result, dtype=np.float64)
        except (TypeError, ValueError) as problem:
            raise PluginFault(f"scorer '{instance.name}' returned {_kind(result)}; return one score per candidate") from problem
        if scores.shape != (len(candidates),):
            raise PluginFault(
                f"scorer '{instance.name}' returned shape {scores.shape} for {len(candidates)} candidates; return one score per candidate"
            )
        within: Scores = np.minimum(np.fmax(scores, 0.0), 1.0)
        if not np.array_equal(scores, within):  # a NaN was replaced, or a value was clipped (a NaN does not equal itself)
            setattr(clipped, CLIPPED, True)
        return within

    return clipped


def mask(instance: Plugin, call: Callable[..., Mask]) -> Callable[..., Mask]:
    """Returns the bound `keep` or `screen`. For a foreign plugin, the returned call checks the mask.

    The check is needed, because numpy would also accept a list of rows as a mask.
    """
    if not foreign(type(instance)):
        return call

    def checked(request: Request, candidates: Candidates, *more: Any) -> Mask:
        result = np.asarray(call(request, candidates, *more))
        if result.dtype != np.bool_ or result.shape != (len(candidates),):
            raise PluginFault(
                f"'{instance.name}' returned shape {result.shape} of {result.dtype} for {len(candidates)} candidates; "
                "return one boolean per candidate"
            )
        return result

    return checked


def _check_waiting(role: str, advice: str) -> Callable[..., None]:
    """Returns a check of a call that may return a Waiting. `role` and `advice`: used in the error text."""

    def check(instance: Plugin, result: object, *_more: object) -> None:
        if result is None or hasattr(result, "add_done_callback"):
            return
        if inspect.iscoroutine(result):
            result.close()
        raise PluginFault(f"{role} '{instance.name}' returned {_kind(result)}; {advice}")

    return check


def _check_profiles(instance: Plugin, result: object, *_more: object) -> None:
    if result is not None and not (isinstance(result, Collection) and all(isinstance(p, Profile) for p in result)):
        raise PluginFault(
            f"profile handler '{instance.name}' picked {_kind(result)}; return a collection of its `profiles`, or an empty one"
        )


def _check_decision(instance: Plugin, result: object, *_more: object) -> None:
    if not (isinstance(result, Decision) and result.targets):
        raise PluginFault(
            f"the result of profile handler '{instance.name}' is {_kind(result)}; return a Decision with a target, or raise Refused"
        )


def _check_indices(instance: Plugin, result: object, *_more: object) -> None:
    if not isinstance(result, (Sequence, np.ndarray)):
        raise PluginFault(f"picker '{instance.name}' returned {_kind(result)}; return a sequence of indices")


def _check_headers(instance: Plugin, headers: dict[str, str]) -> None:
    """Removes headers that cannot be sent, and keeps the others. Raises PluginFault for the first header that it removed."""
    wrong = [
        name
        for name, value in headers.items()
        if not (isinstance(name, str) and _NAME.fullmatch(name) and isinstance(value, str) and _VALUE.fullmatch(value))
    ]
    for name in wrong:
        del headers[name]
    if wrong:
        raise PluginFault(f"'{instance.name}' set the header {wrong[0]!r:.80}; a name must be a token, a value one line of Latin-1 text")


def _check_metadata(instance: Plugin, _result: object, _decision: Decision, response: Response) -> None:
    """Removes metadata that cannot be sent. With it, the last piece of the body, which carries the metadata, would be lost."""
    wrong = [name for name, values in response.metadata.items() if not (_plain({name: values}) and isinstance(values, dict))]
    for name in wrong:
        del response.metadata[name]
    if wrong:
        raise PluginFault(
            f"'{instance.name}' set the metadata {wrong[0]!r:.80}; write a namespace with a mapping of text to text, numbers, "
            "booleans, None, and lists and mappings of those"
        )


def _plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_plain, value))
    return value is None or isinstance(value, (str, int, float))


def _kind(value: object) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


# Checks of foreign plugins' results, except scores and masks. Each check gets the plugin, the result, and the call's arguments without
# the request.
RESULT_CHECKS: Mapping[Point, Callable[..., None]] = {
    Point.PRODUCER: _check_waiting("data producer", "return None or a Waiting of `services` (spawn, http, after)"),
    Point.ADMITTER: _check_waiting("admitter", "return None, or a Waiting of `services` to hold the request"),
    Point.PROFILE_PICKER: _check_profiles,
    Point.PROFILES_RESULT: _check_decision,
    Point.PICKER: _check_indices,
    Point.PRE_REQUEST: lambda plugin, _, decision: _check_headers(plugin, decision.headers),
    Point.RESPONSE_RECEIVED: lambda plugin, _, _decision, response: _check_headers(plugin, response.set_headers),
    Point.RESPONSE_COMPLETE: _check_metadata,
}
