"""Compiles a configuration into tuples of calls. The result is a `Pipeline`, which is immutable. To change it, a worker replaces the whole
pipeline.

`compile_pipeline` turns a `Wiring` (wired instances) into a `Pipeline` (calls, in order). To observe calls, pass a `wrap` function. The
wrap gets each call of each plugin once, with its extension point, and returns the call to use instead. Without a wrap, a request pays
nothing.

    Wiring ── compile_pipeline(wiring, wrap) ──▶ Pipeline        worker: pipeline.start(services), then pipeline.wrapped(timer)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from epp import plugin as points
from epp.candidates import Candidates, Mask
from epp.data import Column
from epp.decision.decision import Decision, ProfileRun, Response
from epp.errors import PluginFault
from epp.plugin import Plugin, Profile, Services, Waiting
from epp.points import instrument
from epp.points.instrument import C, Point, Wrap
from epp.request import Request

K = TypeVar("K", bound=Plugin)
ParseCall = Callable[[Request, str, bytes | memoryview], None]
DecisionCall = Callable[[Request, Decision], None]
ProduceCall = Callable[[Request, Candidates], Waiting | None]


@dataclass(frozen=True)
class WiredProfile:
    """Describes a scheduling profile: its members in order, each with its weight as a scorer. Exactly one member is a picker.

    A shadow profile runs after the decision, for explanations and for statistics of how often it agrees with the decision.
    """

    name: str
    members: tuple[tuple[Plugin, float], ...]
    shadow: bool = False


@dataclass(frozen=True)
class Wiring:
    """Holds the configured plugin instances and their wiring.

    `plugins` are in the order in which they were made, `producers` in the order of calls.
    """

    plugins: tuple[Plugin, ...]
    parsers: tuple[points.Parser, ...]
    handler: points.ProfileHandler
    profiles: tuple[WiredProfile, ...]
    producers: tuple[points.DataProducer, ...]
    columns: tuple[Column[Any], ...] = ()

    def of(self, kind: type[K]) -> list[K]:
        """Returns the plugins that implement an extension point."""
        return [plugin for plugin in self.plugins if isinstance(plugin, kind)]

    def acting(self, kind: type[K]) -> list[K]:
        """Returns the plugins of an extension point, without those that are in shadow profiles only.

        A shadow profile must not affect a request or its response.
        """
        real, shadows = (
            {plugin.name for wired in self.profiles if wired.shadow is shadow for plugin, _ in wired.members} for shadow in (False, True)
        )
        return [plugin for plugin in self.of(kind) if plugin.name in real or plugin.name not in shadows]


@dataclass(frozen=True)
class Pipeline:
    """Holds the calls that a worker makes per request. `parses` are the parsers' calls, in the order of `wiring.parsers`."""

    wiring: Wiring
    parses: tuple[ParseCall, ...]
    request_header: tuple[Callable[[Request], None], ...]
    screeners: tuple[Callable[[Request, Candidates], Mask], ...]
    pick_profiles: Callable[[Request, Mapping[str, Profile], Mapping[str, ProfileRun | None]], Sequence[Profile]]
    result: Callable[[Request, Mapping[str, ProfileRun | None]], Decision]
    profiles: Mapping[str, Profile]
    shadows: tuple[Profile, ...]
    producers: tuple[ProduceCall, ...]
    admitters: tuple[Callable[[Request, Candidates], Waiting | None], ...]
    pre_request: tuple[DecisionCall, ...]
    response_received: tuple[Callable[[Request, Decision, Response], None], ...]
    response_streaming: tuple[DecisionCall, ...]
    response_complete: tuple[Callable[[Request, Decision, Response], None], ...]
    # the calls of `response_streaming`, without those of `first_chunk_only` plugins
    every_chunk: tuple[DecisionCall, ...] = ()
    plugins: Mapping[str, Plugin] = field(default_factory=dict)
    owners: Mapping[int, Plugin] = field(default_factory=dict)  # `id(call)` -> its plugin
    reads_response: bool = False  # whether a plugin reads the headers of every response

    def completing_unsent(self, failed: int) -> list[Callable[[Request, Decision, Response], None]]:
        """Returns the ResponseComplete calls for a request that is not sent because the call at `failed` of `pre_request` raised.

        These are all calls of `response_complete`, except those of plugins whose own call in `pre_request` comes after the failed one
        and therefore did not run.
        """
        acting = self.wiring.acting(points.PreRequest)
        not_called = {plugin.name for plugin in acting[len(acting) - (len(self.pre_request) - failed - 1) :]}
        complete = self.wiring.acting(points.ResponseComplete)
        calls = zip(complete, self.response_complete, strict=True)
        return [call for plugin, call in calls if plugin.name not in not_called]

    @property
    def columns(self) -> tuple[Column[Any], ...]:
        """Returns all columns that any plugin declares, in a fixed order."""
        return self.wiring.columns

    def start(self, services: Services) -> None:
        """Starts every plugin in this process."""
        for instance in self.wiring.plugins:
            try:
                instance.start(services.of(instance))
            except Exception as problem:
                why = f"{type(problem).__name__}: {problem}"
                raise PluginFault(f"plugin '{instance.name}' cannot start: {why}") from problem

    def owner(self, call: object) -> Plugin | None:
        """Returns the plugin that owns this call, or None for a call of the runtime itself."""
        return self.owners.get(id(call))

    def wrapped(self, wrap: Wrap) -> "Pipeline":
        """Returns the same pipeline with `wrap` around every call."""
        return compile_pipeline(self.wiring, wrap)

    def timed_points(self) -> list[tuple[str, Plugin]]:
        """Returns each (extension point, plugin) whose calls may be timed, without repeats."""
        points: dict[tuple[str, str], Plugin] = {}

        def record(point: Point, plugin: Plugin, call: C, /) -> C:
            points.setdefault((point.value, plugin.name), plugin)
            return call

        compile_pipeline(self.wiring, record)
        return [(point, plugin) for (point, _), plugin in points.items()]


class _Owned:
    """A `Wrap` around another `Wrap`. It records which plugin owns each call."""

    def __init__(self, wrap: Wrap) -> None:
        self._wrap = wrap
        self.owners: dict[int, Plugin] = {}

    def __call__(self, point: Point, plugin: Plugin, call: C, /) -> C:
        wrapped = self._wrap(point, plugin, call)
        self.owners[id(wrapped)] = plugin  # the pipeline keeps the call alive, so its id stays unique
        return wrapped


def compile_profile(wired: WiredProfile, wrap: Wrap = instrument.bare) -> Profile:
    """Compiles one profile. If a plugin is several of filter, scorer and picker, it is called as each of these."""
    owned = wrap = _Owned(wrap)
    members = wired.members
    scorers = [(p.static, wrap(Point.SCORER, p, instrument.scorer(p)), weight) for p, weight in members if isinstance(p, points.Scorer)]
    (picker,) = (p for p, _ in members if isinstance(p, points.Picker))
    return Profile(
        wired.name,
        tuple(wrap(Point.FILTER, p, instrument.mask(p, p.keep)) for p, _ in members if isinstance(p, points.Filter)),
        tuple((score, weight) for static, score, weight in scorers if not static),
        picker,
        tuple((score, weight) for static, score, weight in scorers if static),
        pick=wrap(Point.PICKER, picker, picker.pick),
        owners=owned.owners,
    )


def compile_pipeline(wiring: Wiring, wrap: Wrap = instrument.bare) -> Pipeline:
    """Compiles a wiring. Each call goes through `wrap`."""
    owned = wrap = _Owned(wrap)
    handler = wiring.handler
    streaming = [
        (p.first_chunk_only, wrap(Point.RESPONSE_STREAMING, p, p.response_streaming)) for p in wiring.acting(points.ResponseStreaming)
    ]
    return Pipeline(
        wiring=wiring,
        parses=tuple(wrap(Point.PARSER, p, p.parse) for p in wiring.parsers),
        request_header=tuple(wrap(Point.REQUEST_HEADER, p, p.read) for p in wiring.of(points.RequestHeader)),
        screeners=tuple(wrap(Point.SCREENER, p, instrument.mask(p, p.screen)) for p in wiring.acting(points.Screener)),
        pick_profiles=wrap(Point.PROFILE_PICKER, handler, handler.pick),
        result=wrap(Point.PROFILES_RESULT, handler, handler.result),
        profiles={wired.name: compile_profile(wired, wrap) for wired in wiring.profiles if not wired.shadow},
        shadows=tuple(compile_profile(wired, wrap) for wired in wiring.profiles if wired.shadow),
        producers=tuple(wrap(Point.PRODUCER, p, p.produce) for p in wiring.producers),
        admitters=tuple(wrap(Point.ADMITTER, p, p.admit) for p in wiring.acting(points.Admitter)),
        pre_request=tuple(wrap(Point.PRE_REQUEST, p, p.before_send) for p in wiring.acting(points.PreRequest)),
        response_received=tuple(wrap(Point.RESPONSE_RECEIVED, p, p.response_received) for p in wiring.acting(points.ResponseReceived)),
        response_streaming=tuple(call for _, call in streaming),
        every_chunk=tuple(call for first_only, call in streaming if not first_only),
        response_complete=tuple(wrap(Point.RESPONSE_COMPLETE, p, p.response_complete) for p in wiring.acting(points.ResponseComplete)),
        plugins={p.name: p for p in wiring.plugins},
        owners=owned.owners,
        reads_response=bool(wiring.acting(points.ResponseReceived)) or any(p.reads_answer for p in wiring.acting(points.ResponseComplete)),
    )
