"""Keeps the current pipeline of a worker in the forms that requests need.

    Pipelines ─▶ Lease: the pipeline of one request, from its body to the end of its answer
        ▲
        └ leave_out: disables a plugin that fails too often (`workers.worker.isolation`)

The forms of one pipeline are: plain; timed, for a sample of the requests (`Timing`); traced (`Tracer`); and each of these with the
condition of `Prefer: if-available`. All forms are derived from the current pipeline, so they change together. A stream takes one lease. So
the plugins that took part in the decision also see the response, even if the current pipeline has changed meanwhile.
"""

from collections.abc import Collection
from typing import NamedTuple

from epp.decision import if_available
from epp.decision.pipeline import Pipeline, compile_pipeline
from epp.points.instrument import Wrap, bare
from epp.points.isolation import without
from epp.request.paths import Parsers
from workers.worker.telemetry.call_timing import Timing
from workers.worker.telemetry.tracing import Tracer


class Used(NamedTuple):
    """A pipeline, the names of its disabled plugins, and the name of its pool: "" if the picker has one pool."""

    pipeline: Pipeline
    left_out: tuple[str, ...] = ()
    pool: str = ""


class Pipelines:
    """Gives out the pipelines of one worker. `whole`: the configured pipeline. `wrap`: the function that wraps a pipeline's calls."""

    def __init__(
        self, whole: Pipeline, wrap: Wrap = bare, *, timing: Timing | None = None, tracer: Tracer | None = None, pool: str = ""
    ) -> None:
        """`timing` times calls; None if no call is timed. `tracer` traces requests; None if no request is traced. `pool`: as in `Used`."""
        self.whole = whole
        self.timing = timing
        self.tracer = tracer
        self._wrap = wrap
        self._pool = pool
        self.use(whole)

    def use(self, pipeline: Pipeline, left_out: Collection[str] = ()) -> None:
        """Sets the pipeline of all later leases."""
        self.current = Used(pipeline, tuple(left_out), self._pool)
        self.parser = Parsers(pipeline).find
        self._conditional: dict[int, Pipeline] = {}
        if self.timing is not None:
            self.timing.use(pipeline)
        if self.tracer is not None:
            self.tracer.use(pipeline)

    def leave_out(self, names: Collection[str]) -> None:
        """Disables these plugins for all later leases. Without names, uses the whole configured pipeline again."""
        if names:
            self.use(compile_pipeline(without(self.whole.wiring, names), self._wrap), sorted(names))
        else:
            self.use(self.whole)

    def form(self, traced: bool, conditional: bool) -> Pipeline:
        """Returns the current pipeline in the form that one request needs."""
        if traced and self.tracer is not None:
            pipeline = self.tracer.pipeline
        elif self.timing is not None:
            pipeline = self.timing.turn()
        else:
            pipeline = self.current.pipeline
        if not conditional:
            return pipeline
        variant = self._conditional.get(id(pipeline))
        if variant is None:
            variant = self._conditional[id(pipeline)] = if_available.conditional(pipeline)
        return variant


class Lease:
    """The pipeline that one stream uses. Implements `epp.decision.decide.Lease`. `used`: the data for the explanation of the decision.

    `traced`: whether the calls are traced. `conditional`: whether the request is refused if the target does not hold its prompt.
    """

    __slots__ = ("_conditional", "_pipelines", "_traced", "pipeline", "used")

    def __init__(self, pipelines: Pipelines, traced: bool, conditional: bool) -> None:
        self._pipelines = pipelines
        self._traced = traced
        self._conditional = conditional
        self.used = pipelines.current
        self.pipeline = pipelines.form(traced, conditional)

    def renew(self) -> None:
        """Switches to the current pipeline. Called when a request has waited."""
        self.used = self._pipelines.current
        self.pipeline = self._pipelines.form(self._traced, self._conditional)
