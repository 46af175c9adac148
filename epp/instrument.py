"""What stands between the pipeline and a plugin's calls.

`scorer`, `mask` and JUDGES hold foreign plugins to their promise: scores in [0, 1], a boolean for each candidate, headers that can be
sent. Our own are held to it by the contract tests, and pay nothing. `Wrap` is how others look at calls: durations, traces,
explanations each bring one, and no call pays for those that are not there.
"""

import enum
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from epp.candidates import Candidates, Mask, Scores
from epp.decision import Decision, Response
from epp.errors import PluginFault
from epp.plugin import Plugin, Profile, Scorer, ScorerCall, foreign
from epp.request import Request

C = TypeVar("C", bound=Callable[..., Any])

_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


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
        try:
            scores = np.asarray(given, dtype=np.float64)
        except (TypeError, ValueError) as problem:
            raise PluginFault(
                f"scorer '{instance.name}' returned {_kind(given)}; return one score per candidate"
            ) from problem
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


def _awaitable(instance: Plugin, given: object, *_more: object) -> None:
    """Of a data producer."""
    if given is None or hasattr(given, "add_done_callback"):
        return
    if inspect.iscoroutine(given):
        given.close()
    raise PluginFault(
        f"data producer '{instance.name}' returned {_kind(given)}; return None, or what `services` made to wait for (spawn, http, after)"
    )


def _profiles(instance: Plugin, given: object, *_more: object) -> None:
    if given is not None and not (isinstance(given, Collection) and all(isinstance(p, Profile) for p in given)):
        raise PluginFault(
            f"profile handler '{instance.name}' picked {_kind(given)}; return some of the profiles it was given, or none"
        )


def _decision(instance: Plugin, given: object, *_more: object) -> None:
    if not (isinstance(given, Decision) and given.targets):
        raise PluginFault(
            f"profile handler '{instance.name}' gave as its result {_kind(given)}; return a Decision with a target, or raise Refused"
        )


def _indices(instance: Plugin, given: object, *_more: object) -> None:
    if not isinstance(given, (Sequence, np.ndarray)):
        raise PluginFault(f"picker '{instance.name}' returned {_kind(given)}; return a sequence of indices")


def _sent(instance: Plugin, _given: object, decision: Decision) -> None:
    _headers(instance, decision.headers)


def _received(instance: Plugin, _given: object, _decision: Decision, response: Response) -> None:
    _headers(instance, response.set_headers)


def _headers(instance: Plugin, headers: dict[str, str]) -> None:
    """Those that cannot be sent leave: what comes after has to do without them."""
    wrong = [
        name
        for name, value in headers.items()
        if not (isinstance(name, str) and _NAME.fullmatch(name) and isinstance(value, str) and _VALUE.fullmatch(value))
    ]
    for name in wrong:
        del headers[name]
    if wrong:
        raise PluginFault(
            f"'{instance.name}' set the header {wrong[0]!r:.80}; names are tokens, and values one line of Latin-1 text"
        )


def _completed(instance: Plugin, _given: object, _decision: Decision, response: Response) -> None:
    """Of what the gateway is told with an answer's last piece: it would be lost with the rest of the answer."""
    wrong = [name for name, told in response.metadata.items() if not (_plain({name: told}) and isinstance(told, dict))]
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


def _kind(given: object) -> str:
    return "None" if given is None else f"an object of type {type(given).__name__}"


# What foreign plugins return at these points, besides scores and masks, is judged at once; given the result and what the call got.
JUDGES: Mapping[Point, Callable[..., None]] = {
    Point.PRODUCER: _awaitable,
    Point.PROFILE_PICKER: _profiles,
    Point.PROFILES_RESULT: _decision,
    Point.PICKER: _indices,
    Point.PRE_REQUEST: _sent,
    Point.RESPONSE_RECEIVED: _received,
    Point.RESPONSE_COMPLETE: _completed,
}
