"""How often shadow profiles agree with the real decision."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from epp.decision.decision import Decision, ProfileRun
from epp.decision.pipeline import WiredProfile, Wiring, compile_pipeline
from epp.metrics.request_series import SHADOWS
from epp.plugin import Filter, NoParams, Plugin, Scorer
from epp.plugins.parsers.openai import OpenAI
from epp.plugins.pickers.max_score import MaxScore
from epp.plugins.profiles import SingleProfile
from shm.segment import Region
from shm.series import SeriesWriter
from shm.series_reader import SeriesReader
from tests.fakes import FakePool, candidates
from tests.pair import Pair
from tests.workers.worker.extproc.streams import BODY
from workers.process.layout import series_schema_of
from workers.worker.telemetry.alternatives import Agreements, agrees


class Counts:
    """The series of a worker in plain memory."""

    def __init__(self) -> None:
        self.schema = series_schema_of(SHADOWS, areas=1)
        self.region = Region(memoryview(bytearray(self.schema.bytes)))
        self.agreements = Agreements(SeriesWriter(self.schema, self.schema.area(self.region, 0)))

    def rows(self) -> dict[tuple[str, ...], int]:
        rows: Any = SeriesReader(self.schema, self.region, serving=lambda _: True).rows()
        return {labels: values.counters[0] for labels, values in rows.items()}


def run(totals: Sequence[float], picked: int, rows: Sequence[int] | None = None) -> ProfileRun:
    """A run over three endpoints. `rows`: the endpoints that the filters left."""
    all_three = candidates({"waiting_requests": [0, 0, 0]})
    if rows is not None:
        all_three = all_three.keep(np.isin(np.arange(3), rows))
    return ProfileRun(all_three, np.array(totals, dtype=np.float64), (picked,))


def test_the_same_endpoint_agrees_at_any_position_among_the_candidates() -> None:
    assert agrees(run([0, 1, 3], 2), run([2, 1, 9], 2))
    assert agrees(run([0, 1, 3], 2), run([2, 9], 1, rows=[0, 2]))
    assert agrees(run([2, 9], 1, rows=[0, 2]), run([0, 1, 3], 2))


def test_another_endpoint_differs_unless_the_real_pick_has_the_same_total_in_the_shadow_profile() -> None:
    assert not agrees(run([0, 1, 3], 2), run([9, 1, 3], 0))
    assert agrees(run([0, 1, 3], 2), run([3, 1, 3], 0)), "only the random choice among equals differed"
    assert agrees(run([0, 1, 3], 2), run([5, 5], 0, rows=[1, 2]))
    assert not agrees(run([0, 1, 3], 2), run([4, 5], 1, rows=[0, 1])), "the real pick was filtered out"


def test_decisions_are_counted_by_profile_and_outcome_and_a_run_without_candidates_differs() -> None:
    counts = Counts()
    decision = Decision((), {"a": run([0, 1, 3], 2)}, primary="a")
    decision.shadows = {"s": run([0, 0, 1], 2), "t": run([1, 0, 0], 0), "u": None}
    counts.agreements.count(decision)
    decision.shadows = {"s": run([1, 0, 0], 0)}
    counts.agreements.count(decision)
    assert counts.rows() == {("s", "agreed"): 1, ("s", "differed"): 1, ("t", "differed"): 1, ("u", "differed"): 1}


class Prefers(Scorer):
    """Gives one endpoint the score 1."""

    def __init__(self, row: int) -> None:
        super().__init__(f"prefers-{row}", NoParams())
        self.row = row

    def score(self, request: Any, candidates: Any, profile: Any) -> Any:
        return np.equal(np.arange(len(candidates)), self.row).astype(np.float64)


class RejectsAll(Filter):
    def __init__(self) -> None:
        super().__init__("nobody", NoParams())

    def keep(self, request: Any, candidates: Any, profile: Any) -> Any:
        return np.zeros(len(candidates), dtype=bool)


class Breaks(Filter):
    def __init__(self) -> None:
        super().__init__("breaks", NoParams())

    def keep(self, request: Any, candidates: Any, profile: Any) -> Any:
        raise ZeroDivisionError


def test_a_stream_counts_once_per_decision_and_a_failed_run_is_not_counted() -> None:
    picker = MaxScore("picker", MaxScore.Params())
    one, two, none, breaks = Prefers(1), Prefers(2), RejectsAll(), Breaks()
    members: dict[str, tuple[Plugin, ...]] = {"same": (one,), "other": (two,), "empty": (none,), "broken": (breaks,)}
    parser, handler = OpenAI("parser", NoParams()), SingleProfile("handler", NoParams())
    profiles = [WiredProfile("real", ((one, 1.0), (picker, 1.0)))]
    profiles += [WiredProfile(name, (*((m, 1.0) for m in given), (picker, 1.0)), shadow=True) for name, given in members.items()]
    plugins: tuple[Plugin, ...] = (parser, handler, picker, one, two, none, breaks)
    pipeline = compile_pipeline(Wiring(plugins, (parser,), handler, tuple(profiles), ()))
    pair, counts = Pair(pipeline, FakePool(candidates({"waiting_requests": [0, 0, 0]}))), Counts()
    pair.app.telemetry.agreements = counts.agreements
    for _ in range(3):
        envoy = pair.open()
        envoy.headers()
        assert envoy.body(BODY)[0].WhichOneof("response") == "request_headers"
    assert counts.rows() == {("same", "agreed"): 3, ("other", "differed"): 3, ("empty", "differed"): 3}
