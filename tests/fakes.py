"""Fakes of the objects that `workers` passes to `epp`: endpoints, snapshots, services, pools."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from compiled.outlook import COSTS, TIMES
from epp.candidates import Candidates, Endpoint, Roster, Snapshot
from epp.data import WAITING
from epp.errors import ProducerFailed
from epp.learning.costs import LearnedCosts
from epp.learning.local import LocalLearning
from epp.learning.model import LatencyModel
from epp.metrics import Metric
from epp.plugin import DataProducer, Hashes, HeldView, HttpAnswer, Measure, Plugin, Profile
from epp.request import Prompt, Request, Subset
from shm.prefills import local_prefills
from tests.reports import Reports


def endpoints(count: int, labels: Sequence[Mapping[str, str]] = ()) -> list[Endpoint]:
    """Makes endpoints 10.0.0.1:8000, 10.0.0.2:8000, ... in slots 0, 1, ... with owner ids 1, 2, ..."""
    return [
        Endpoint(
            name=f"pod-{i}",
            namespace="default",
            host=f"10.0.0.{i + 1}",
            port=8000,
            labels=labels[i] if labels else None,
            slot=i,
            owner=i + 1,
        )
        for i in range(count)
    ]


def snapshot(
    values: Mapping[str, Sequence[float]] | None = None,
    *,
    count: int | None = None,
    fresh: Sequence[bool] | None = None,
    known: Sequence[bool] | None = None,
    down: Sequence[bool] | None = None,
    inflight_at_scrape: Sequence[float] | None = None,
    names: Mapping[str, Sequence[frozenset[str]]] | None = None,
    labels: Sequence[Mapping[str, str]] = (),
    ages: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
) -> Snapshot:
    """Makes a snapshot. `values`: column name -> one value per endpoint. All endpoints are fresh by default."""
    columns = {name: np.array(column, dtype=np.float64) for name, column in (values or {}).items()}
    size = count if count is not None else len(next(iter(columns.values())))
    mask = lambda values, default: np.array(values if values is not None else [default] * size, dtype=bool)  # noqa: E731 - three uses
    return Snapshot(
        Roster(endpoints(size, labels)),
        columns,
        fresh=mask(fresh, True),
        known=mask(known, True),
        down=mask(down, False),
        inflight_at_scrape=np.array(
            inflight_at_scrape if inflight_at_scrape is not None else [0.0] * size, dtype=np.float64
        ),
        names=names,
        ages=None if ages is None else np.array(ages, dtype=np.float64),
        weights=None if weights is None else np.array(weights, dtype=np.float64),
    )


def candidates(
    values: Mapping[str, Sequence[float]] | None = None,
    *,
    inflight: Sequence[float] | None = None,
    tokens: Sequence[float] | None = None,
    **more: object,
) -> Candidates:
    """Makes candidates over `snapshot(values, **more)`. `inflight`, `tokens`: requests and tokens in flight, one value per endpoint."""
    shot = snapshot(values, **more)  # type: ignore[arg-type]
    none = [0.0] * len(shot.endpoints)
    requests, load = (counts if counts is not None else none for counts in (inflight, tokens))
    return Candidates(shot, np.array(requests, dtype=np.float64), np.array(load, dtype=np.float64))


def predictions(
    first_s: Sequence[float],
    *,
    costs: Sequence[float] | None = None,
    model: LatencyModel | None = None,
    why_not: str = "",
) -> LearnedCosts:
    """Makes predicted times to the first token, one per endpoint, with these costs in seconds (the same, if None)."""
    outlook = np.zeros((6, len(first_s)))
    outlook[TIMES], outlook[COSTS] = first_s, first_s if costs is None else costs
    pool = candidates({WAITING.name: [0.0] * len(first_s)})
    return LearnedCosts(outlook[COSTS], outlook, pool, model or LatencyModel(), why_not)


def request(prompt: bytes = b"", **fields: object) -> Request:
    """Makes a parsed completion request. `fields`: attributes of the request."""
    parsed = Request(
        id="r",
        path="/v1/completions",
        headers={},
        now=0.0,
        model=str(fields.pop("model", "m")),
        prompt=Prompt(lambda: prompt),
    )
    for name, value in fields.items():
        setattr(parsed, name, value)
    return parsed


class Observed:
    """The handle of a histogram. It keeps the observed values."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def observe(self, value: float) -> None:
        self.values.append(value)


class Counted:
    """The handle of a counter. It keeps its counts: labels -> count."""

    def __init__(self) -> None:
        self.values: Counter[tuple[str, ...]] = Counter()

    def add(self, *labels: str, n: int = 1) -> None:
        self.values[labels] += n


class Shown:
    """The handle of a gauge. It keeps its last values: labels -> value."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        self.weights: dict[tuple[str, ...], float] = {}

    def set(self, value: float, *labels: str, weight: float = 1.0) -> None:
        self.values[labels] = value
        self.weights[labels] = weight


class FakeHeld:
    """An `epp.plugin.HeldBlocks`. Tests set `view_` (None: no endpoint is precise) and `by_row`: row -> keys of its blocks."""

    def __init__(self) -> None:
        self.view_: HeldView | None = None
        self.by_row: dict[int, dict[int, int]] = {}  # row -> key -> weight in thousandths
        self.expected: list[tuple[list[int], int, int]] = []

    def view(self, roster: Roster, now: float) -> HeldView:
        size = len(roster.endpoints)
        none = HeldView((), np.zeros(size, dtype=bool), (0,) * size, ("not followed",) * size, frozenset())
        return self.view_ or none

    def match(self, view: HeldView, hashes: Hashes, block_tokens: int) -> tuple[list[int], list[int]]:
        blocks, weighted = [], []
        for row, size in enumerate(view.block_tokens):
            held = self.by_row.get(row, {}) if size == block_tokens and view.precise[row] else {}
            weights = list(itertools.takewhile(bool, (held.get(key, 0) for key in hashes.tolist())))
            blocks.append(len(weights))
            weighted.append(sum(weights))
        return blocks, weighted

    def measure(self, latency: Measure) -> None:
        """Does nothing, because tests do not read the latency."""

    def expect(self, hashes: Hashes, owner: int, block_tokens: int) -> None:
        self.expected.append((hashes.tolist(), owner, block_tokens))


class FakeWaiting:
    """An `epp.plugin.Waiting` without an event loop. The test calls `finish`."""

    def __init__(self, what: str = "") -> None:
        self.what = what
        self.done = False
        self.left = False  # all waiters have left
        self._result: Any = None
        self._problem: BaseException | None = None
        self._calls: list[Callable[[Any], object]] = []
        self._waiters = 0

    def finish(self, result: Any = None, problem: BaseException | None = None) -> None:
        assert not self.done, f"{self.what} is done"
        self.done, self._result, self._problem = True, result, problem
        calls, self._calls = self._calls, []
        for call in calls:
            call(self)

    def add_done_callback(self, call: Callable[[Any], object], /) -> None:
        if self.done:
            call(self)
        else:
            self._calls.append(call)

    def leave(self) -> None:
        self.left = True

    def __await__(self) -> Generator[Any, Any, Any]:
        self._waiters += 1
        try:
            if not self.done:
                yield self
        finally:
            self._waiters -= 1
            if not self.done and not self._waiters:
                self.leave()
        if self._problem is not None:
            raise self._problem
        return self._result


class FakeWork(FakeWaiting):
    """Runs a coroutine at once until it waits."""

    def __init__(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> None:
        super().__init__(work.__qualname__)
        self.timeout_s = timeout_s
        self._work = work
        self._step(None)

    def _step(self, _done: object) -> None:
        if self.done or self.left:
            return
        try:
            waiting = self._work.send(None)
        except StopIteration as stop:
            self.finish(stop.value)
        except Exception as problem:
            self.finish(problem=problem)
        else:
            waiting.add_done_callback(self._step)

    def expire(self) -> None:
        """Ends the work as its timeout does."""
        self._work.close()
        self.finish(problem=TimeoutError(f"{self.what}: not done within {self.timeout_s:g} s"))

    def leave(self) -> None:
        super().leave()
        self._work.close()


class FakeCall(FakeWaiting):
    """One request of `FakeServices.http`."""

    def __init__(self, method: str, url: str, headers: Mapping[str, str], body: bytes, timeout_s: float) -> None:
        super().__init__(f"{method} {url}")
        self.method, self.url, self.headers, self.body, self.timeout_s = method, url, headers, body, timeout_s

    def answer(self, body: bytes, status: int = 200, seconds: float = 0.0) -> None:
        self.finish(HttpAnswer(status, {}, body, seconds))


class FakeServices:
    """An `epp.plugin.Services` with a dict as the index and a counter as the load.

    Work runs at once until it waits. HTTP requests are in `asked` until the test or `server` answers them. Pauses are in `pauses` until
    the test ends them.
    """

    def __init__(self, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.load = self
        self.prefix_index = self
        self.prefix_seed = 99
        self.held_blocks = FakeHeld()
        self.prefills = local_prefills()
        self.learning = LocalLearning()
        self.tokens: dict[int, int] = {}
        self.held: dict[int, set[int]] = {}
        self.measured: dict[str, Observed] = {}
        self.counted: dict[str, Counted] = {}
        self.shown: dict[str, Shown] = {}
        self.warned = Reports()
        self.periodic: list[tuple[float, Callable[[], object]]] = []
        self.environment: dict[str, str] = {}
        self.works: list[FakeWork] = []
        self.pauses: list[tuple[float, FakeWaiting]] = []
        self.asked: list[FakeCall] = []
        self.server: Callable[[FakeCall], object] | None = None

    def of(self, plugin: Plugin) -> "FakeServices":
        return self

    def add_tokens(self, endpoint: Endpoint, tokens: int) -> None:
        self.tokens[endpoint.slot] = self.tokens.get(endpoint.slot, 0) + tokens

    def match(self, hashes: Hashes) -> Mapping[int, int]:
        matches = {}
        for block, value in enumerate(hashes.tolist()):
            for owner in self.held.get(value, ()):
                matches[owner] = block + 1
        return matches

    def learn(self, hashes: Hashes, owner: int) -> None:
        for value in hashes.tolist():
            self.held.setdefault(value, set()).add(owner)

    def forget(self, hashes: Hashes, owner: int) -> None:
        for value in hashes.tolist():
            self.held.get(value, set()).discard(owner)

    def measure(self, plugin: Plugin, metric: Metric) -> Observed:
        return self.measured.setdefault(metric.name, Observed())

    def count(self, plugin: Plugin, metric: Metric) -> Counted:
        return self.counted.setdefault(metric.name, Counted())

    def gauge(self, plugin: Plugin, metric: Metric) -> Shown:
        return self.shown.setdefault(metric.name, Shown())

    def warn(self, plugin: Plugin, event: str, **fields: object) -> None:
        self.warned(event, **fields)

    def every(self, seconds: float, act: Callable[[], object]) -> None:
        self.periodic.append((seconds, act))

    def after(self, seconds: float) -> FakeWaiting:
        pause = FakeWaiting(f"pause of {seconds:g} s")
        self.pauses.append((seconds, pause))
        return pause

    def spawn(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> FakeWork:
        begun = FakeWork(work, timeout_s)
        self.works.append(begun)
        return begun

    def http(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, body: bytes = b"", *, timeout_s: float
    ) -> FakeCall:
        call = FakeCall(method, url, headers or {}, body, timeout_s)
        self.asked.append(call)
        if self.server is not None:
            self.server(call)
        return call


class FakePool:
    """An `epp.decide.EndpointPool` over fixed candidates."""

    def __init__(self, fixed: Candidates) -> None:
        self.fixed = fixed
        self.time = 0.0
        self.failures: list[tuple[str, str]] = []
        self.scorer_failures: list[Exception] = []
        self.shadow_failures: list[Exception] = []

    trials: Mapping[int, int] = {}

    def candidates(self, subset: Subset | None) -> Candidates:
        if subset is None:
            return self.fixed
        allowed = set(subset.entries)
        return self.fixed.keep(
            np.array([e.address in allowed or e.host in allowed for e in self.fixed.endpoints], dtype=bool)
        )

    def reloaded(self, candidates: Candidates) -> Candidates:
        return self.fixed if candidates.rows is None else candidates

    def now(self) -> float:
        return self.time

    def scorer_failed(self, problem: Exception) -> None:
        self.scorer_failures.append(problem)

    def shadow_failed(self, profile: Profile, problem: Exception) -> None:
        self.shadow_failures.append(problem)

    def producer_failed(self, producer: DataProducer, failure: ProducerFailed) -> None:
        self.failures.append((producer.name, str(failure)))
