"""Findings about several pools: each rule about a pool sees only what belongs to it, and names it."""

from typing import Any

from tests.workers.supervisor.pages.state.test_findings import endpoint, values
from workers.supervisor.pages.state.findings import findings
from workers.supervisor.pages.state.pool_findings import SAME_MAX

HALF = {"bands": [{"pool": "a", "requests": 9}, {"pool": "b", "requests": 9}]}
FULL = {"flow_control": {"saturation": {"effective": 1.2}}}


def of(*pools: str, **changes: Any) -> dict[str, Any]:
    return values(pools={pool: {} for pool in pools}, **changes)


def found(state: dict[str, Any], *endpoints: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each.rule, str(each.pool)) for each in findings(state, {str(at): each for at, each in enumerate(endpoints)})]


def test_pools_with_healthy_endpoints_have_no_finding() -> None:
    assert found(of("a", "b"), endpoint(pool="a"), endpoint(pool="b")) == []


def test_a_pool_without_endpoints_is_named_although_others_have_some() -> None:
    (one,) = findings(of("a", "b"), {"x": endpoint(pool="a")})
    assert (one.rule, one.pool, one.title) == ("no-endpoints", "b", "Pool b: The pool has no endpoints")


def test_endpoints_are_counted_for_each_pool() -> None:
    down = [endpoint(pool="a", state="down"), endpoint(pool="b", state="down"), endpoint(pool="b", state="down")]
    titles = [each.title for each in findings(of("a", "b"), {str(at): each for at, each in enumerate(down)})]
    assert titles == ["Pool a: 1 endpoint refuses connections", "Pool b: 2 endpoints refuse connections"]


def test_block_sizes_may_differ_between_pools_but_not_within_one() -> None:
    small = endpoint()["scraped"]
    large = small | {"cache_block_size": 64}
    assert found(of("a", "b"), endpoint(pool="a", scraped=small), endpoint(pool="b", scraped=large)) == []
    mixed = found(of("a"), endpoint(pool="a", scraped=small), endpoint(pool="a", scraped=large))
    assert mixed == [("block-sizes", "a")]


def test_only_the_pool_that_is_full_is_full() -> None:
    state = values(pools={"a": FULL, "b": {}}, **HALF)
    assert found(state, endpoint(pool="a"), endpoint(pool="b")) == [("full", "a")]


def test_warnings_and_plugins_that_are_left_out_belong_to_their_pools() -> None:
    configurations = [{"pools": ["a"], "warnings": ["warning[x]: y"]}, {"pools": ["b"], "warnings": []}]
    state = of("a", "b", settings={"configurations": configurations}, left_out={"scorer of pool b": 2})
    assert found(state, endpoint(pool="a"), endpoint(pool="b")) == [("left-out", "b"), ("configuration", "a")]


def test_a_pool_that_is_out_of_service_is_named_with_its_plugin_if_that_is_known() -> None:
    state = values(pools={"a": {"out_of_service": "odd-scorer"}, "b": {"out_of_service": ""}, "c": {}})
    known = {pool: endpoint(pool=pool) for pool in "abc"}
    out = [each for each in findings(state, known) if each.rule == "out-of-service"]
    assert [(each.pool, each.evidence.partition(" when")[0]) for each in out] == [
        ("a", "the plugin odd-scorer ran"),
        ("b", "its requests were decided"),
    ]


def test_what_belongs_to_no_pool_is_found_once() -> None:
    state = of("a", "b", recent={"faults_total": 3})
    assert found(state, endpoint(pool="a"), endpoint(pool="b")) == [("faults", "UNSET")]


def test_a_finding_of_many_pools_is_shown_for_a_few_and_counted_for_the_others() -> None:
    *some, last = findings(of(*(f"p{number:03}" for number in range(100))), {})
    assert len(some) == SAME_MAX
    assert last.title == "The same in 80 more pools" and last.evidence.startswith("p020, p021") and "and 60 more" in last.evidence


def test_an_inference_pool_that_is_not_served_is_named_with_the_reason_and_the_option() -> None:
    state = of("a", pools_unserved={"b": "its endpointPickerRef has port 9200, which --pool-ports does not have"})
    (one,) = findings(state, {"x": endpoint(pool="a")})
    assert (one.rule, one.title) == ("pool-not-served", "InferencePool b is not served")
    assert "9200" in one.evidence and "--pool-ports" in one.fix


def test_a_picker_that_has_found_no_pool_says_what_would_be_one() -> None:
    (one,) = findings(of(settings={"flags": {"service-name": {"value": "epp"}}}), {})
    assert (one.rule, one.severity) == ("no-pools", "warning")
    assert "Service 'epp'" in one.evidence
    assert [each.rule for each in findings(of(pools_unserved={"b": "why"}), {})] == ["pool-not-served"]
