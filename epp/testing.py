"""Tools for the test of a plugin, with one import: endpoints with values, a request, and the plugin as a configuration makes it.

    pool = candidates({"waiting_requests": [3, 0]}, labels=[{"zone": "a"}, {"zone": "b"}])
    assert scores(made(SameZone), request(headers={"x-zone": "b"}), pool) == [0.0, 1.0]

`FakeServices` stands in for the picker: it keeps what the plugin counts, logs and asks for, and has no event loop and no clock.

May import: all of epp. Imported by: tests.
"""

import random
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from epp.candidates import Age, Candidates, Endpoint, EndpointList, Snapshot
from epp.learning.local import LocalLearning
from epp.metrics import Metric
from epp.plugin import Filter, Hashes, HeldBlocks, HttpAnswer, Plugin, Prefills, Profile, Scorer, Services
from epp.plugins.pickers import Parameters
from epp.plugins.pickers.max_score import MaxScore
from epp.request import Prompt, Request

PROFILE = Profile("default", (), (), MaxScore("max-score-picker", Parameters()))
Made = TypeVar("Made", bound=Plugin)


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

    def mask(given: Sequence[bool] | None, default: bool) -> NDArray[np.bool_]:
        return np.array(given if given is not None else [default] * size, dtype=bool)

    return Snapshot(
        EndpointList(endpoints(size, labels)),
        columns,
        fresh=mask(fresh, True),
        known=mask(known, True),
        down=mask(down, False),
        inflight_at_scrape=np.array(inflight_at_scrape if inflight_at_scrape is not None else [0.0] * size, dtype=np.float64),
        names=names,
        age=Age(
            None if ages is None else np.array(ages, dtype=np.float64), None if weights is None else np.array(weights, dtype=np.float64)
        ),
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


def request(prompt: bytes = b"", **fields: object) -> Request:
    """Makes a parsed completion request. `fields`: attributes of the request."""
    parsed = Request(id="r", path="/v1/completions", headers={}, now=0.0, model=str(fields.pop("model", "m")))
    parsed.prompt = Prompt(lambda: prompt)
    for name, value in fields.items():
        setattr(parsed, name, value)
    return parsed


def made(cls: type[Made], services: "FakeServices | None" = None, /, **parameters: Any) -> Made:
    """Makes and starts a plugin as a configuration does. `parameters`: the parameters, with names in camelCase. Raises
    msgspec.ValidationError or ValueError.
    """
    plugin = cls(cls.type_name, msgspec.convert(parameters, cls.Params))
    plugin.start(services or FakeServices())
    return plugin


def scores(scorer: Scorer, request: Request, candidates: Candidates, profile: Profile = PROFILE) -> list[float]:
    """Returns the score of each endpoint. A scorer that returns None, because it has no opinion, gives zeros, as in a profile."""
    found = scorer.score(request, candidates, profile)
    return [0.0] * len(candidates) if found is None else found.tolist()


def kept(keeper: Filter, request: Request, candidates: Candidates, profile: Profile = PROFILE) -> list[int]:
    """Returns the positions of the endpoints that a filter keeps."""
    return np.flatnonzero(keeper.keep(request, candidates, profile)).tolist()


class Observed:
    """The handle of a histogram, which keeps the observed values."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def observe(self, value: float) -> None:
        self.values.append(value)


class Counted:
    """The handle of a counter, which keeps the counts: labels -> count."""

    def __init__(self) -> None:
        self.values: Counter[tuple[str, ...]] = Counter()

    def add(self, *labels: str, n: int = 1) -> None:
        self.values[labels] += n


class Shown:
    """The handle of a gauge, which keeps the last values: labels -> value."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        self.weights: dict[tuple[str, ...], float] = {}

    def set(self, value: float, *labels: str, weight: float = 1.0) -> None:
        self.values[labels] = value
        self.weights[labels] = weight


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
        super().__init__(getattr(work, "__qualname__", ""))
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


class FakeServices(Services):
    """An `epp.plugin.Services` with a dict as the prefix index and a counter as the load. A test sets `held_blocks` and `prefills`.

    Work runs at once until it waits. HTTP requests are in `asked` until the test or `server` answers them. Pauses are in `pauses` until
    the test ends them.
    """

    held_blocks: HeldBlocks
    prefills: Prefills

    def __init__(self, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.load = self
        self.prefix_index = self
        self.prefix_seed = 99
        self.learning = LocalLearning()
        self.tokens: dict[int, int] = {}
        self.held: dict[int, set[int]] = {}
        self.measured: dict[str, Observed] = {}
        self.counted: dict[str, Counted] = {}
        self.shown: dict[str, Shown] = {}
        self.warned: list[str] = []  # lines: the event, then its fields as name=value
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
        self.warned.append(" ".join([event, *(f"{name}={value}" for name, value in fields.items())]))

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

    def http(self, method: str, url: str, headers: Mapping[str, str] | None = None, body: bytes = b"", *, timeout_s: float) -> FakeCall:
        call = FakeCall(method, url, headers or {}, body, timeout_s)
        self.asked.append(call)
        if self.server is not None:
            self.server(call)
        return call
