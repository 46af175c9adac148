"""Checks of a plugin class before an instance is made."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from epp.config import registry
from epp.config.plugin_class import fault
from epp.data import Datum
from epp.metrics import Metric
from epp.plugin import Filter, Plugin, Scorer
from tests.cases import cases
from workers.process.loading import read_plugins

SEEN = Datum("seen", int, default=0)


FETCHES = Metric("fetches_total", "counter", "Fetches.", labels=("result",))


def declares(metric: object) -> type:
    return scorer(metrics=(metric,))


def scorer(**members: Any) -> type:
    return type("Mine", (Scorer,), {"score": lambda self, request, candidates, profile: None} | members)


async def later(self: object, request: object, candidates: object, profile: object) -> None:
    pass


class WithDefaults(Scorer):
    def score(self, request: Any, candidates: Any, profile: Any, *, more: int = 1) -> None:
        pass


class Takes(msgspec.Struct):
    weight: float = 1.0


class TakesArrays(msgspec.Struct):
    weights: np.ndarray | None = None


class TakesWhatIsNowhere(msgspec.Struct):
    weight: "Nowhere" = None  # type: ignore[name-defined]  # noqa: F821


@cases("name", sorted(registry.known()))
def test_built_in_plugins_have_no_fault(name: str) -> None:
    assert fault(registry.known()[name]) == ""


@pytest.mark.parametrize(
    "cls",
    [
        WithDefaults,
        scorer(Params=Takes, consumes=(SEEN,), optional=[SEEN]),
        scorer(consumes=property(lambda self: ())),
        scorer(metrics=[FETCHES, Metric("fetch_seconds", "histogram", "Time.", (0.1, 1.0))]),
        scorer(score=staticmethod(lambda *parts: None)),
        scorer(__init__=lambda self, *arguments: None),
    ],
)
def test_a_class_with_callable_methods_has_no_fault(cls: type) -> None:
    assert fault(cls) == ""


@cases(
    ("cls", "message"),
    [
        (object, "is not a plugin class: inherit from an extension point"),
        (len, "is not a plugin class"),
        (Plugin, "is not a plugin class"),
        (type("Mine", (Scorer,), {}), "has no method score(self, request, candidates, profile)"),
        (scorer(scores=1, score=lambda self, request: None), "has a method score(self, request): it is called as score(self, request, c"),
        (scorer(score=later), "has a method score that is a coroutine"),
        (scorer(__init__=lambda self: None), "has a method __init__(self): it is called as __init__(self, name, params)"),
        (scorer(start=lambda self: None), "has a method start(self): it is called as start(self, services)"),
        (scorer(Params=dict), "has Params that is not a msgspec.Struct"),
        (scorer(Params=TakesArrays), "a field that cannot be read from a file: type <class 'numpy.ndarray'> is not supported"),
        (scorer(Params=TakesWhatIsNowhere), "a field that cannot be read from a file: name 'Nowhere' is not defined"),
        (scorer(score=lambda self, *, request, candidates, profile: None), "a method score(self, *, request, candidates, profile): it is"),
        (scorer(metrics=FETCHES), "write a tuple of Metric (epp.metrics), with a comma after a single one"),
        (declares("fetches_total"), "has metrics with 'fetches_total': write Metric(name, kind, help, ...)"),
        (declares(FETCHES._replace(name="my fetches_total")), "has a metric 'my fetches_total': a name has letters"),
        (declares(FETCHES._replace(name="fetches")), "has a metric 'fetches': a counter's name ends in _total"),
        (declares(FETCHES._replace(name="request_total")), "which is a name of the picker itself"),
        (declares(FETCHES._replace(help="two\nlines")), "write one line"),
        (declares(FETCHES._replace(labels="result")), "write a tuple of names"),
        (declares(FETCHES._replace(labels=("plugin_name",))), "plugin_name and plugin_type are added to every metric"),
        (declares(Metric("open", "summary", "Open.")), "a plugin may have counters, gauges, and histograms without labels"),
        (declares(Metric("fetch_seconds", "histogram", "Time.", labels=("result",))), "histograms without labels"),
        (declares(Metric("fetch_seconds", "histogram", "Time.")), "one or more, in rising order"),
        (scorer(consumes=("waiting_requests",)), "has consumes = ('waiting_requests',): write a tuple of Column or Datum"),
        (scorer(keeps=SEEN), "with a comma after a single one"),
        (type("Both", (Filter, scorer()), {}), "has no method keep(self, request, candidates, profile)"),
    ],
)  # fmt: skip
def test_a_class_that_would_fail_every_request_has_a_fault_with_a_fix(cls: type, message: str) -> None:
    assert message in fault(cls)


def test_classes_of_folders_and_class_paths_are_checked(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from epp.plugin import Scorer, plugin\n@plugin('half-a-scorer')\nclass Half(Scorer):\n    pass\n"
    (tmp_path / "half.py").write_text(text)
    monkeypatch.setattr(registry, "REGISTERED", dict(registry.known()))
    monkeypatch.setattr("epp.points.base.REGISTERED", registry.REGISTERED)
    with pytest.raises(registry.PluginImportError, match=r"half\.py: type 'half-a-scorer': class Half has no method score"):
        registry.add_sources(str(tmp_path), read_plugins(str(tmp_path)))
    with pytest.raises(registry.UnknownType, match="the class has no method score"):
        registry.find("tests.epp.config.test_plugin_class:HalfByPath")


class HalfByPath(Scorer):
    consumes: Sequence[Datum[int]] = (SEEN,)
