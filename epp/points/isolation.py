"""Isolates failing plugins: finds the plugin that raised an exception, and builds the pipeline without it.

An exception of a plugin costs one request. A plugin that fails repeatedly is disabled for a while, if requests can be routed without
it: scorers, data producers (readers of their data get the default), RequestHeader and PreRequest plugins, and all that follow responses.
Parsers, profile handlers and pickers are never disabled, because they have no substitute. Filters, screeners, admitters and deciders
are never disabled, because without them requests could go to endpoints that must not serve them.

A request without an exception pays nothing: the loops that call plugins tag an exception with its plugin (`epp.errors.blame`).
"""

from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from epp import plugin as points
from epp.decision.pipeline import Wiring
from epp.errors import blamed
from epp.plugin import Plugin

FAULTS_MAX: Final = 5  # this many faults of one plugin within WITHIN_S are too many
WITHIN_S: Final = 60.0
PAUSE_S: Final = 60.0  # how long a plugin is disabled before it is tried again
NAMED_MAX: Final = 1024  # plugins whose faults are remembered; the configuration bounds their number, too

INDISPENSABLE: Final = (
    points.Parser, points.ProfileHandler, points.Picker, points.Filter, points.Screener, points.Admitter, points.Decider,
)  # fmt: skip
DISPENSABLE: Final = (
    points.RequestHeader, points.DataProducer, points.Scorer,
    points.PreRequest, points.ResponseReceived, points.ResponseStreaming, points.ResponseComplete,
)  # fmt: skip


def dispensable(plugin: Plugin) -> bool:
    """Returns whether a pipeline works without this plugin."""
    return isinstance(plugin, DISPENSABLE) and not isinstance(plugin, INDISPENSABLE)


def without(wiring: Wiring, names: Collection[str]) -> Wiring:
    """Returns the wiring without the plugins of these names. All of them must be `dispensable`."""
    return replace(
        wiring,
        plugins=tuple(p for p in wiring.plugins if p.name not in names),
        producers=tuple(p for p in wiring.producers if p.name not in names),
        profiles=tuple(
            replace(wired, members=tuple((p, weight) for p, weight in wired.members if p.name not in names)) for wired in wiring.profiles
        ),
    )


class Faults:
    """Counts the recent faults of each plugin."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}

    def too_many(self, name: str, now: float) -> bool:
        """Records a fault at `now` (monotonic seconds). Returns whether the plugin now has too many faults."""
        if len(self._times) >= NAMED_MAX:
            self._times.clear()
        times = self._times.setdefault(name, deque(maxlen=FAULTS_MAX))
        times.append(now)
        return len(times) == FAULTS_MAX and now - times[0] <= WITHIN_S

    def tried_again(self, name: str, now: float) -> None:
        """Records that the plugin runs again after its pause. One more fault within WITHIN_S is then too many."""
        self._times[name] = deque([now] * (FAULTS_MAX - 1), FAULTS_MAX)


def culprit(problem: BaseException) -> Plugin | None:
    """Returns the plugin that raised this exception (`epp.errors.blame`), or None if no plugin raised it."""
    plugin = blamed(problem)
    return plugin if isinstance(plugin, Plugin) else None
