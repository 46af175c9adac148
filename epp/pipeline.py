"""The compiled form of a configuration: tuples of calls, immutable, behind one reference.

`compile_pipeline` turns a `Recipe` (instances, wired) into a `Pipeline` (calls, in order). Whoever wants to see the calls gives
a `Wrap`: it is offered every call of every plugin once, with its extension point, and returns what is called instead. Nothing
is wrapped otherwise, so what is not asked for costs nothing per request.

    Recipe ── compile_pipeline(recipe, wrap) ──▶ Pipeline        worker: pipeline.start(services), then pipeline.wrapped(timer)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from epp import instrument
from epp.candidates import Candidates, Mask
from epp.data import Column
from epp.decision import Decision, ProfileRun, Response
from epp.errors import PluginFault
from epp.instrument import C, Point, Wrap
from epp.plugin import (
    Admitter,
    DataProducer,
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
    Services,
    Waiting,
)  # fmt: skip
from epp.request import Request

K = TypeVar("K", bound=Plugin)
ParseCall = Callable[[Request, str, bytes | memoryview], None]
ProduceCall = Callable[[Request, Candidates], Waiting | None]


@dataclass(frozen=True, slots=True)
class WiredProfile:
    """A scheduling profile: its members in order, each with the weight that it has as a scorer. One of them is the picker.

    A shadow profile runs after the decision, for explanations and counts of how often it agrees.
    """

    name: str
    members: tuple[tuple[Plugin, float], ...]
    shadow: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """Instances and how they are wired. `plugins` in the order in which they were made, `producers` in that in which they run."""

    plugins: tuple[Plugin, ...]
    parsers: tuple[Parser, ...]
    handler: ProfileHandler
    profiles: tuple[WiredProfile, ...]
    producers: tuple[DataProducer, ...]
    columns: tuple[Column[Any], ...] = ()

    def of(self, kind: type[K]) -> list[K]:
        """Those that implement an extension point."""
        return [plugin for plugin in self.plugins if isinstance(plugin, kind)]

    def acting(self, kind: type[K]) -> list[K]:
        """The same without those that are in shadow profiles alone: a shadow changes nothing of a request or its answer."""
        real, shadows = (
            {plugin.name for wired in self.profiles if wired.shadow is shadow for plugin, _ in wired.members}
            for shadow in (False, True)
        )
        return [plugin for plugin in self.of(kind) if plugin.name in real or plugin.name not in shadows]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a worker runs per request. `parses` are the parsers' calls, in the order of `recipe.parsers`."""

    recipe: Recipe
    parses: tuple[ParseCall, ...]
    request_header: tuple[Callable[[Request], None], ...]
    screeners: tuple[Callable[[Request, Candidates], Mask], ...]
    pick_profiles: Callable[[Request, Mapping[str, Profile], Mapping[str, ProfileRun | None]], Sequence[Profile]]
    result: Callable[[Request, Mapping[str, ProfileRun | None]], Decision]
    profiles: Mapping[str, Profile]
    shadows: tuple[Profile, ...]
    producers: tuple[ProduceCall, ...]
    admitters: tuple[Callable[[Request, Candidates], None], ...]
    pre_request: tuple[Callable[[Request, Decision], None], ...]
    response_received: tuple[Callable[[Request, Decision, Response], None], ...]
    response_streaming: tuple[Callable[[Request, Decision], None], ...]
    response_complete: tuple[Callable[[Request, Decision, Response], None], ...]
    response_failed: tuple[Callable[[Request, Decision, Response], None], ...]
    every_chunk: tuple[
        Callable[[Request, Decision], None], ...
    ] = ()  # of response_streaming, those that see all chunks
    plugins: Mapping[str, Plugin] = field(default_factory=dict)

    @property
    def reads_response(self) -> bool:
        """Whether any plugin looks at every answer of the model servers."""
        complete = (p for p in self.recipe.acting(ResponseComplete) if p.reads_answer and not p.failures_only)
        return bool(self.response_received) or any(complete)

    def taking_back(self, failed: int) -> list[Callable[[Request, Decision, Response], None]]:
        """Who is to hear that a request is over which was never sent, since the call at `failed` of `pre_request` raised: all of
        `response_complete` and `response_failed` but those whose turn in `pre_request` had not come."""
        acting = self.recipe.acting(PreRequest)
        untold = {plugin.name for plugin in acting[len(acting) - (len(self.pre_request) - failed - 1) :]}
        complete = self.recipe.acting(ResponseComplete)
        ordered = sorted(complete, key=lambda plugin: plugin.failures_only)  # as the calls are
        calls = (*self.response_complete, *self.response_failed)
        return [call for plugin, call in zip(ordered, calls, strict=True) if plugin.name not in untold]

    @property
    def columns(self) -> tuple[Column[Any], ...]:
        """All columns that any plugin declares, in a fixed order."""
        return self.recipe.columns

    def start(self, services: Services) -> None:
        """Starts every plugin in this process."""
        for instance in self.recipe.plugins:
            try:
                instance.start(services)
            except Exception as problem:
                why = f"{type(problem).__name__}: {problem}"
                raise PluginFault(f"plugin '{instance.name}' cannot start: {why}") from problem

    def producer(self, call: ProduceCall) -> DataProducer:
        """The one of whom this is the call."""
        return self.recipe.producers[self.producers.index(call)]

    def wrapped(self, wrap: Wrap) -> "Pipeline":
        """The same pipeline with `wrap` around every call."""
        return compile_pipeline(self.recipe, wrap)

    def timed_points(self) -> list[tuple[str, Plugin]]:
        """Every (extension point, plugin) that is called on the way of a request, each once."""
        found: dict[tuple[str, str], Plugin] = {}

        def note(point: Point, plugin: Plugin, call: C, /) -> C:
            found.setdefault((point.value, plugin.name), plugin)
            return call

        compile_pipeline(self.recipe, note)
        return [(point, plugin) for (point, _), plugin in found.items()]


def compile_profile(wired: WiredProfile, wrap: Wrap = instrument.bare) -> Profile:
    """One profile; a plugin that implements several roles gets all of them. Exactly one picker is among the members."""
    members = wired.members
    scorers = [
        (p.static, wrap(Point.SCORER, p, instrument.scorer(p)), weight)
        for p, weight in members
        if isinstance(p, Scorer)
    ]
    (picker,) = (p for p, _ in members if isinstance(p, Picker))
    return Profile(
        wired.name,
        tuple(wrap(Point.FILTER, p, instrument.mask(p, p.keep)) for p, _ in members if isinstance(p, Filter)),
        tuple((score, weight) for static, score, weight in scorers if not static),
        picker,
        tuple((score, weight) for static, score, weight in scorers if static),
        pick=wrap(Point.PICKER, picker, picker.pick),
    )


def compile_pipeline(recipe: Recipe, wrap: Wrap = instrument.bare) -> Pipeline:
    """All calls of a recipe, each offered to `wrap`."""
    handler = recipe.handler
    streaming = [
        (p.first_chunk_only, wrap(Point.RESPONSE_STREAMING, p, p.response_streaming))
        for p in recipe.acting(ResponseStreaming)
    ]
    return Pipeline(
        recipe=recipe,
        parses=tuple(wrap(Point.PARSER, p, p.parse) for p in recipe.parsers),
        request_header=tuple(wrap(Point.REQUEST_HEADER, p, p.read) for p in recipe.of(RequestHeader)),
        screeners=tuple(wrap(Point.SCREENER, p, instrument.mask(p, p.screen)) for p in recipe.acting(Screener)),
        pick_profiles=wrap(Point.PROFILE_PICKER, handler, handler.pick),
        result=wrap(Point.PROFILES_RESULT, handler, handler.result),
        profiles={wired.name: compile_profile(wired, wrap) for wired in recipe.profiles if not wired.shadow},
        shadows=tuple(compile_profile(wired, wrap) for wired in recipe.profiles if wired.shadow),
        producers=tuple(wrap(Point.PRODUCER, p, p.produce) for p in recipe.producers),
        admitters=tuple(wrap(Point.ADMITTER, p, p.admit) for p in recipe.acting(Admitter)),
        pre_request=tuple(wrap(Point.PRE_REQUEST, p, p.before_send) for p in recipe.acting(PreRequest)),
        response_received=tuple(
            wrap(Point.RESPONSE_RECEIVED, p, p.response_received) for p in recipe.acting(ResponseReceived)
        ),
        response_streaming=tuple(call for _, call in streaming),
        every_chunk=tuple(call for first_only, call in streaming if not first_only),
        response_complete=tuple(
            wrap(Point.RESPONSE_COMPLETE, p, p.response_complete)
            for p in recipe.acting(ResponseComplete)
            if not p.failures_only
        ),
        response_failed=tuple(
            wrap(Point.RESPONSE_COMPLETE, p, p.response_complete)
            for p in recipe.acting(ResponseComplete)
            if p.failures_only
        ),
        plugins={p.name: p for p in recipe.plugins},
    )
