"""Stand-ins for what `workers` hands to `epp`: endpoints, snapshots, services, pools."""

import random
from collections.abc import Mapping, Sequence

import numpy as np

from epp.candidates import Candidates, Endpoint, Roster, Snapshot
from epp.errors import ProducerFailed
from epp.metrics import Metric
from epp.plugin import Hashes, Plugin
from epp.request import Prompt, Request, Subset


def endpoints(count: int, labels: Sequence[Mapping[str, str]] = ()) -> list[Endpoint]:
    """Endpoints 10.0.0.1:8000, 10.0.0.2:8000, ... in slots 0, 1, ... with owner ids 1, 2, ..."""
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
) -> Snapshot:
    """A snapshot of as many endpoints as the columns are long; all fresh unless said otherwise."""
    columns = {name: np.array(column, dtype=np.float64) for name, column in (values or {}).items()}
    size = count if count is not None else len(next(iter(columns.values())))
    mask = lambda given, default: np.array(given if given is not None else [default] * size, dtype=bool)  # noqa: E731 - three uses
    return Snapshot(
        Roster(endpoints(size)),
        columns,
        fresh=mask(fresh, True),
        known=mask(known, True),
        down=mask(down, False),
        inflight_at_scrape=np.array(
            inflight_at_scrape if inflight_at_scrape is not None else [0.0] * size, dtype=np.float64
        ),
        names=names,
    )


def candidates(
    values: Mapping[str, Sequence[float]] | None = None, *, inflight: Sequence[float] | None = None, **more: object
) -> Candidates:
    """Candidates over `snapshot(values, **more)`."""
    made = snapshot(values, **more)  # type: ignore[arg-type]
    size = len(made.endpoints)
    return Candidates(
        made, np.array(inflight if inflight is not None else [0.0] * size, dtype=np.float64), np.zeros(size)
    )


def request(prompt: bytes = b"", **fields: object) -> Request:
    """A parsed completion request."""
    made = Request(
        id="r",
        path="/v1/completions",
        headers={},
        now=0.0,
        model=str(fields.pop("model", "m")),
        prompt=Prompt(lambda: prompt),
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


class Observed:
    """A metric handle that keeps what it was given."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def observe(self, value: float) -> None:
        self.values.append(value)


class FakeServices:
    """`epp.plugin.Services` with an index that is a dict and a load that is a counter."""

    def __init__(self, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.load = self
        self.prefix_index = self
        self.prefix_seed = 99
        self.tokens: dict[int, int] = {}
        self.held: dict[int, set[int]] = {}
        self.measured: dict[str, Observed] = {}

    def add_tokens(self, endpoint: Endpoint, tokens: int) -> None:
        self.tokens[endpoint.slot] = self.tokens.get(endpoint.slot, 0) + tokens

    def match(self, hashes: Hashes) -> Mapping[int, int]:
        found = {}
        for block, value in enumerate(hashes.tolist()):
            for owner in self.held.get(value, ()):
                found[owner] = block + 1
        return found

    def learn(self, hashes: Hashes, owner: int) -> None:
        for value in hashes.tolist():
            self.held.setdefault(value, set()).add(owner)

    def measure(self, plugin: Plugin, metric: Metric) -> Observed:
        return self.measured.setdefault(metric.name, Observed())


class FakePool:
    """`epp.decide.Pool` over fixed candidates."""

    def __init__(self, fixed: Candidates) -> None:
        self.fixed = fixed
        self.failures: list[ProducerFailed] = []

    def candidates(self, subset: Subset | None) -> Candidates:
        if subset is None:
            return self.fixed
        allowed = set(subset.entries)
        return self.fixed.keep(
            np.array([e.address in allowed or e.host in allowed for e in self.fixed.endpoints], dtype=bool)
        )

    def producer_failed(self, failure: ProducerFailed) -> None:
        self.failures.append(failure)
