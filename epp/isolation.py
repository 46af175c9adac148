"""Which plugin an exception came from, and the same pipeline without it.

An exception of a plugin costs one request. One that fails again and again is left out for a while, so that it costs no more, if
requests can be routed without it: scorers, data producers (who read their data see the default) and whatever is told of requests
and answers. Never left out are parsers, profile handlers and pickers, which have no substitute, and filters, screeners, admitters
and deciders: without one of those, requests would go where they must not.

Nothing here costs a request that goes well: the plugin is found in the traceback of the exception.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import replace
from types import FrameType
from typing import Final

from epp.pipeline import Recipe
from epp.plugin import (
    Admitter,
    DataProducer,
    Decider,
    Filter,
    Parser,
    Picker,
    Plugin,
    PreRequest,
    Profile,
    ProfileHandler,
    RequestHeader,
    ResponseComplete,
    ResponseReceived,
    ResponseStreaming,
    Scorer,
    Screener,
)  # fmt: skip

FAULTS_MAX: Final = 5  # of one plugin
WITHIN_S: Final = 60.0
PAUSE_S: Final = 60.0  # how long it is left out, before it is tried again
NAMED_MAX: Final = 1024  # plugins that are remembered; the configuration bounds them too

INDISPENSABLE: Final = (Parser, ProfileHandler, Picker, Filter, Screener, Admitter, Decider)
DISPENSABLE: Final = (
    RequestHeader, DataProducer, Scorer, PreRequest, ResponseReceived, ResponseStreaming, ResponseComplete,
)  # fmt: skip


def dispensable(plugin: Plugin) -> bool:
    """Whether a pipeline can do without it."""
    return isinstance(plugin, DISPENSABLE) and not isinstance(plugin, INDISPENSABLE)


def without(recipe: Recipe, names: Collection[str]) -> Recipe:
    """The recipe without these plugins, all of which are dispensable."""
    return replace(
        recipe,
        plugins=tuple(p for p in recipe.plugins if p.name not in names),
        producers=tuple(p for p in recipe.producers if p.name not in names),
        profiles=tuple(
            replace(wired, members=tuple((p, weight) for p, weight in wired.members if p.name not in names))
            for wired in recipe.profiles
        ),
    )


class Faults:
    """How often plugins have failed of late."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}

    def too_many(self, name: str, now: float) -> bool:
        """Notes a failure; whether it is one too many."""
        if len(self._times) >= NAMED_MAX:
            self._times.clear()
        times = self._times.setdefault(name, deque(maxlen=FAULTS_MAX))
        times.append(now)
        return len(times) == FAULTS_MAX and now - times[0] <= WITHIN_S

    def tried_again(self, name: str, now: float) -> None:
        """Its pause is over: for a while, the next failure is one too many."""
        self._times[name] = deque([now] * (FAULTS_MAX - 1), FAULTS_MAX)


def culprit(problem: BaseException) -> Plugin | None:
    """The plugin whose code was running, the innermost one; None: it was not a plugin's."""
    found: Plugin | None = None
    traceback = problem.__traceback__
    while traceback is not None:
        found = _of_frame(traceback.tb_frame) or found
        traceback = traceback.tb_next
    return found


def _of_frame(frame: FrameType) -> Plugin | None:
    """That of a method of a plugin, or of the runtime while it judges what a plugin returned."""
    local = frame.f_locals
    for name in ("self", "instance"):
        if isinstance(local.get(name), Plugin):
            return local[name]  # type: ignore[no-any-return]
    if frame.f_code.co_name == "check_picked" and isinstance(local.get("profile"), Profile):
        return local["profile"].picker  # type: ignore[no-any-return]
    return None
