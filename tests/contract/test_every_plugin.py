"""Every registered plugin meets the contract of its extension point. A new plugin is tested because it is registered."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.candidates import Candidates
from epp.config import registry
from epp.data import ACTIVE_MODELS, WAITING_MODELS, Column
from epp.plugin import EXTENSION_POINTS, DataProducer, Filter, Picker, Plugin, PreRequest, Scorer, Screener
from epp.plugins.producers.approx_prefix import ApproximatePrefix
from epp.points.base import REGISTERED
from epp.prefix.match import APPROXIMATE
from epp.request import Request
from tests.cases import cases
from tests.epp.plugins.calls import PROFILE
from tests.examples import examples
from tests.fakes import FakeServices, candidates, request

registry.known()
REQUIRED: dict[str, dict[str, Any]] = {  # parameters of types that have no usable defaults
    "by-label": {"label": "a", "validValues": ["b"]},
    "disaggregatedset-rollout-screener": {
        "scope": {"labelSelector": "set=a"},
        "revisionGating": {"mode": "sum", "requiredRoles": ["prefill", "decode"]},
        "headerSelectors": [{"name": "zone", "headerName": "x-zone", "labelKey": "zone", "mode": "strict"}],
    },
    "endpoint-attribute-filter": {
        "attribute": "RunningRequestsSize",
        "algorithm": {"type": "threshold", "threshold": {"operator": "LessThan", "value": 5}},
    },
    "endpoint-attribute-scorer": {"attributeKey": "KVCacheUsagePercent", "algorithm": {"type": "linear_lower_is_better"}},
    "header-label-affinity-scorer": {"headerName": "x-zone", "labelKey": "zone"},
    "k8s-notification-source": {"version": "v1", "kind": "Pod"},
    "max-saturation-detector": {"detectors": ["concurrency-detector", "utilization-detector"]},
    "priority-holdback-policy": {"minCeiling": 0.5},
    "request-attribute-reporter": {"attributes": [{"key": {"name": "cost"}, "expression": "usage.total_tokens"}]},
    "session-id-producer": {"headerName": "x-session-id"},
    "utilization-filter": {"conditions": [{"metric": "waiting-queue", "maxValue": 5}]},
}


def of(kind: type[Plugin]) -> list[Any]:
    classes = {cls for cls in REGISTERED.values() if issubclass(cls, kind) and cls.__module__.startswith("epp.")}
    return sorted(classes, key=lambda cls: cls.type_name)


def made(cls: type[Plugin]) -> Plugin:
    plugin = cls(cls.type_name, msgspec.convert(REQUIRED.get(cls.type_name, {}), cls.Params))
    resolved(plugin).start(FakeServices())
    return plugin


def resolved(plugin: Plugin) -> Plugin:
    """The plugin with those that its required parameters name: defaults of the types of these names."""
    if REQUIRED.get(plugin.type_name) and plugin.needs:
        plugin.resolve({key: made(REGISTERED[need.name]) for key, need in plugin.needs.items()})
    return plugin


@st.composite
def situations(draw: st.DrawFn) -> Candidates:
    """Any endpoints with any values of any freshness, narrowed to any subset."""
    size = draw(st.integers(1, 12))
    numbers = st.lists(st.one_of(st.floats(0, 1e9), st.just(float("nan"))), min_size=size, max_size=size)
    flags = st.lists(st.booleans(), min_size=size, max_size=size)
    names = st.lists(st.frozensets(st.sampled_from(["m", "a", "b"])), min_size=size, max_size=size)
    columns = (
        "waiting_requests",
        "running_requests",
        "kv_cache_usage",
        "max_lora",
        "cache_block_size",
        "cache_num_blocks",
        "cache_ranks",
        "cache_tokens",
    )
    made = candidates(
        {name: draw(numbers) for name in columns},
        inflight=draw(st.lists(st.integers(0, 1000), min_size=size, max_size=size)),
        fresh=draw(flags),
        known=draw(flags),
        names={ACTIVE_MODELS.name: draw(names), WAITING_MODELS.name: draw(names)},
    )
    mask = np.array(draw(flags))
    return made.keep(mask) if mask.any() else made


@given(situation=situations(), prompt=st.binary(max_size=2000))
@examples(60)
def test_scores_are_a_new_float64_array_in_0_to_1_with_one_value_per_candidate(situation: Candidates, prompt: bytes) -> None:
    r = request(prompt)
    producer = ApproximatePrefix(APPROXIMATE, ApproximatePrefix.Params())
    producer.start(FakeServices())
    producer.produce(r, situation)
    for cls in of(Scorer):  # in one test: to make the situations costs more than to score them
        check_scores(made(cls), r, situation)


def check_scores(scorer: Plugin, r: Request, situation: Candidates) -> None:
    before = {c: np.array(situation[c]) for c in scorer.consumes if isinstance(c, Column)}
    scores = scorer.score(r, situation, PROFILE)  # type: ignore[attr-defined]
    if scores is None:  # means 0 for every candidate
        return
    assert scores.dtype == np.float64 and scores.shape == (len(situation),), scorer.name
    assert ((scores >= 0) & (scores <= 1)).all(), scorer.name
    for column, values in before.items():
        assert (np.array(situation[column]) == values).all(), f"{scorer.name} changed shared data"
    assert scores is not scorer.score(r, situation, PROFILE), scorer.name  # type: ignore[attr-defined]


@given(situation=situations(), inflight=st.integers(0, 9))
@examples(60)
def test_static_scorers_do_not_depend_on_the_request_or_the_load(situation: Candidates, inflight: int) -> None:
    busier = Candidates(situation.snapshot, situation._inflight + inflight, None, situation.rows)
    for cls in of(Scorer):
        if cls.static:
            scorer = made(cls)
            one, other = scorer.score(request(b"a"), situation, PROFILE), scorer.score(request(b"b"), busier, PROFILE)  # type: ignore[attr-defined]
            assert (one == other).all()


@given(situation=situations())
@examples(60)
def test_filters_return_one_bool_per_candidate(situation: Candidates) -> None:
    for cls in of(Filter):
        mask = made(cls).keep(request(), situation, PROFILE)  # type: ignore[attr-defined]
        assert mask.dtype == np.bool_ and mask.shape == (len(situation),)


@given(situation=situations())
@examples(60)
def test_screeners_return_one_bool_per_candidate(situation: Candidates) -> None:
    for cls in of(Screener):
        mask = made(cls).screen(request(headers={"x-zone": "a"}), situation)  # type: ignore[attr-defined]
        assert mask.dtype == np.bool_ and mask.shape == (len(situation),)


@given(situation=situations(), data=st.data())
@examples(60)
def test_pickers_return_at_least_one_candidate_and_none_twice(situation: Candidates, data: st.DataObject) -> None:
    size = len(situation)
    totals = np.array(data.draw(st.lists(st.floats(0, 10), min_size=size, max_size=size)))
    for cls in of(Picker):
        picked = made(cls).pick(request(), situation, totals.copy(), PROFILE)  # type: ignore[attr-defined]
        assert picked and len(set(picked)) == len(picked) and all(0 <= index < size for index in picked), cls.type_name


@cases("cls", of(Plugin))
def test_every_plugin_has_an_extension_point_and_a_description(cls: type[Plugin]) -> None:
    assert any(issubclass(cls, point) for point in EXTENSION_POINTS)
    assert cls.__doc__
    assert cls.Params.__struct_config__.frozen and cls.Params.__struct_config__.forbid_unknown_fields


@pytest.mark.parametrize("cls", of(DataProducer), ids=lambda cls: cls.type_name)
def test_a_producer_can_produce_twice_before_a_request_is_sent(cls: type[DataProducer]) -> None:
    producer = made(cls)
    c = candidates({"waiting_requests": [0, 0]})
    for _ in range(2):
        r = request(b"x" * 1000)
        waiting = producer.produce(r, c)  # type: ignore[attr-defined]
        for datum in producer.produces if waiting is None else ():  # the producer's own tests cover the other case
            assert r.data[datum.name] is not None
    assert isinstance(producer, PreRequest) or producer.produces
