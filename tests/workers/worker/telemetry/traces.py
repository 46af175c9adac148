"""What tests of traces share: parents, plugins that keep or break spans, a picker that records its spans, a Python of its own."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from epp.candidates import Candidates, Mask, Scores
from epp.data import KV_USAGE, WAITING
from epp.decision.decision import Decision, ProfileRun
from epp.decision.pipeline import WiredProfile, Wiring, compile_pipeline
from epp.errors import Cause, Refused
from epp.plugin import DataProducer, Filter, NoParams, Plugin, Profile, ProfileHandler, Scorer
from epp.plugins.parsers.openai import OpenAI, Passthrough
from epp.plugins.pickers.max_score import MaxScore
from epp.plugins.profiles import SingleProfile
from epp.plugins.scorers.reported import QueueDepth
from epp.points.instrument import C, Point
from epp.protocol import codec
from epp.request import Request
from tests.fakes import FakePool, FakeServices, candidates
from tests.pair import Pair, set_headers
from workers.transport.interface import Metadata
from workers.worker.telemetry.tracing import Span, Tracer

ROOT = Path(__file__).parents[4]
BODY = b'{"model":"m","prompt":"hello"}'
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = (f"00-{TRACE_ID}-{PARENT_ID}-{flags}" for flags in ("01", "00"))


class Keeps(Filter):
    """Keeps the endpoints at these positions."""

    def __init__(self, name: str, *places: int) -> None:
        super().__init__(name, NoParams())
        self.places = places

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        return np.isin(np.arange(len(candidates)), self.places)


class Silent(Scorer):
    type_name = "silent-scorer"

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        return None


class Refuses(Scorer):
    type_name = "broken-scorer"

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        raise Refused(Cause.NOT_ADMITTED, "no luck")


class Broken(Scorer):
    type_name = "broken-scorer"

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        raise ZeroDivisionError("no luck")


class Both(ProfileHandler):
    """Runs all profiles in one round. The last one with an endpoint decides."""

    def pick(self, request: Request, profiles: Mapping[str, Profile], runs: Mapping[str, ProfileRun | None]) -> Sequence[Profile]:
        return () if runs else tuple(profiles.values())

    def result(self, request: Request, runs: Mapping[str, ProfileRun | None]) -> Decision:
        found = {name: run for name, run in runs.items() if run is not None}
        if not found:
            raise Refused(Cause.NO_ENDPOINT_LEFT)
        name, run = found.popitem()
        return Decision(run.targets, runs, primary=name)


class Waits(DataProducer):
    """A producer that waits for ever."""

    def __init__(self) -> None:
        super().__init__("waits", NoParams())

    def add_done_callback(self, callback: Callable[..., Any]) -> None:
        """The callback is never called."""

    def __await__(self) -> Any:
        yield self

    def produce(self, request: Request, candidates: Candidates) -> Any:
        return self


class Counts:
    """A `Wrap` that counts calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Point, str]] = []

    def __call__(self, point: Point, plugin: Plugin, call: C, /) -> C:
        def counted(*args: Any) -> Any:
            self.calls.append((point, plugin.name))
            return call(*args)

        return counted  # type: ignore[return-value]


class Site:
    """A pair with traces. `spans` has the spans of sampled requests, in the order of their ends."""

    def __init__(
        self,
        *profiles: Sequence[Plugin],
        handler: ProfileHandler | None = None,
        producers: tuple[DataProducer, ...] = (),
        ratio: float = 0.0,
        count: int = 3,
        shadow: bool = False,
        emit: Callable[[Span], None] | None = None,
    ) -> None:
        picker = MaxScore("best", MaxScore.Params())
        parsers = (OpenAI("o", NoParams()), Passthrough("x", NoParams()))
        handler = handler or SingleProfile("h", NoParams())
        members = [(*given, picker) for given in profiles or ((QueueDepth("queue", NoParams()),),)]
        names = ("default", "second")[: len(members)]
        wiring = Wiring(
            plugins=(handler, *parsers, *producers, *{p.name: p for given in members for p in given}.values()),
            parsers=parsers,
            handler=handler,
            profiles=tuple(
                WiredProfile(name, tuple((p, 2.0) for p in given), shadow=shadow and name == "second")
                for name, given in zip(names, members, strict=True)
            ),
            producers=producers,
            columns=(WAITING, KV_USAGE),
        )
        self.timers = Counts()
        pipeline = compile_pipeline(wiring, self.timers)
        pipeline.start(FakeServices())
        columns = {"waiting_requests": [2.0, 0.0, 1.0], KV_USAGE.name: [0.5, 0.25, 0.0]}
        self.pair = Pair(pipeline, FakePool(candidates({n: v[:count] for n, v in columns.items()}, count=count)))
        self.spans: list[Span] = []
        self.ticks = iter(range(1, 1 << 30))
        self.pair.app.pipelines.tracer = Tracer(
            pipeline,
            self.timers,
            emit or self.spans.append,
            ratio=ratio,
            rng=random.Random(7),
            clock=lambda: next(self.ticks),
            wall=lambda: 1_000_000,
        )

    def answered(self, *, status: str = "200", metadata: Metadata = (), **headers: str) -> Mapping[str, str]:
        """Sends one request and its answer. Returns the headers that the model server gets. `metadata`: those of the stream."""
        envoy = self.pair.open(metadata)
        envoy.headers(**headers)
        answers = envoy.body(BODY)
        envoy.response_headers(status)
        envoy.response_body(b"{}")
        envoy.handler.half_closed()
        return set_headers(answers[0])

    def tree(self) -> list[str]:
        """The names of the spans, indented by depth, in the order of their beginnings."""
        by_id = {span.span_id: span for span in self.spans}

        def depth(span: Span) -> int:
            above = by_id.get(span.parent)
            return 0 if above is None else 1 + depth(above)

        return ["  " * depth(span) + span.name for span in sorted(self.spans, key=lambda s: (s.start, -s.end))]

    def span(self, name: str) -> Span:
        (found,) = (span for span in self.spans if span.name == name)
        return found


def headers(**values: str) -> codec.Headers:
    message = b"".join(codec.field(1, codec.field(1, name.encode()) + codec.field(3, value.encode())) for name, value in values.items())
    payload = codec.field(1, message)
    return codec.Headers(payload, 0, len(payload))


def decided(site: Site, **given: str) -> tuple[list[list[float] | None], list[float], list[int]]:
    """The run of a request: scores, totals, picked."""
    envoy = site.pair.open()
    envoy.headers(**given)
    envoy.body(BODY)
    run = envoy.handler.response_phase._decision.runs["default"]
    envoy.handler.closed()
    scores = [None if given is None else given.tolist() for given in run.scores]
    return scores, run.totals.tolist(), list(run.picked)


def python(script: str, **environ: str) -> str:
    """The output of a new interpreter."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=clean | environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
