"""The findings: each rule finds its fault, and names the evidence and what to do."""

from typing import Any

import pytest

from epp.plugins.extractors._pages import REFUSED_PAGE, UNREAD_VALUES
from epp.prefix.streams import NO_EVENTS, NOT_CONNECTED, OTHER_TOPIC, PARTLY_REUSED
from tests.cases import cases
from workers.supervisor.pages.state.findings import findings


def endpoint(**changes: Any) -> dict[str, Any]:
    scraped = {"waiting_requests": 0, "running_requests": 0, "kv_cache_usage": 0, "cache_block_size": 16}
    return {"name": "a", "address": "10.0.0.1:80", "state": "fresh", "scraped": scraped} | changes


def values(**changes: Any) -> dict[str, Any]:
    return {
        "workers": [{"worker": 0, "state": "serving", "starts": 1}],
        "workers_serving": 1,
        "supervisor": {"serving": True},
        "counters": {},
        "bus_drops": 0,
        "at": 100_000.0,
    } | changes


OF_DOCTOR = {
    "rule": "gateway-tls",
    "severity": "error",
    "title": "The gateway speaks plaintext",
    "evidence": "no transport_socket",
    "fix": "add one",
    "found_by": "doctor",
}
RELOAD = {"generation": 2, "workers": 1, "last_reload_failed": "config.yaml:3: unknown-field"}
UNREPORTED = {"predicted_share": 0.6, "reported_share": 0.0}
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "endpoints-down": ({}, {"state": "down"}, "10.0.0.1:80"),
    "endpoints-stale": ({}, {"state": "stale"}, "10.0.0.1:80"),
    "endpoints-unknown": ({}, {"state": "unknown"}, "10.0.0.1:80"),
    "endpoints-ejected": ({}, {"state": "ejected", "why": "100% of its last 9 answers failed"}, "100% of its last 9"),
    "endpoints-failing": ({}, {"state": "failing", "why": "60% of its last 9 answers failed"}, "60% of its last 9"),
    "missing-metrics": ({}, {"state": "unknown", "why": REFUSED_PAGE + "vllm:x is missing"}, "vllm:x is missing"),
    "metrics-absent": ({}, {"why": UNREAD_VALUES + "vllm:x: the page has no such series"}, "vllm:x: the page has no"),
    "prefix-caching": ({}, UNREPORTED | {"predicted_tokens": 300.0}, "10.0.0.1:80"),
    "worker-away": ({"workers": [{"worker": 0, "state": "not serving", "starts": 4}]}, {}, "4 starts"),
    "worker-late": ({"workers": [{"worker": 0, "state": "serving", "starts": 1, "loop_lag_s": 0.5}]}, {}, "0.5 s"),
    "restarts": ({"processes": {"worker 0": {"exits": {"signal": 2, "done": 5}}}}, {}, "2 by signal"),
    "reload": ({"configuration": RELOAD}, {}, "unknown-field"),
    "generations": ({"configuration": RELOAD | {"last_reload_failed": "", "workers": 0}}, {}, "0 of 1"),
    "configuration": ({"settings": {"warnings": ["a warning"]}}, {}, "a warning"),
    "out-of-service": ({"out_of_service": "my-scorer"}, {}, "the plugin my-scorer ran when they ended"),
    "left-out": ({"left_out": {"my-scorer": 2}}, {}, "in 2 workers"),
    "full": ({"flow_control": {"saturation": {"effective": 1.2}}, "bands": [{"requests": 4}]}, {}, "saturation 1.2, 4 requests wait"),
    "hot-flow": (
        {"bands": [{"requests": 20}], "flows": [{"fairness_id": "x", "requests": 15}, {"fairness_id": "y", "requests": 5}]},
        {},
        "x has 15 of 20",
    ),
    "bus-drops": ({"bus_drops": 3}, {}, "3 updates"),
    "handshakes-given-up": ({"recent": {"handshakes_given_up_total": 20, "connections_total": 100}}, {}, "20 TLS connections"),
    "replicas": ({"replica_store_connected": False, "others": {"age_s": 9}}, {}, "9 s ago"),
    "scrapes-late": ({"recent": {"scrapes_total": 100, "scrapes_skipped_total": 40}}, {}, "40 scrapes skipped"),
    "other-senders": ({"recent": {"scrapes_total": 100, "scrapes_foreign_total": 40}}, {}, "40 of 100 metrics pages"),
    "not-full-duplex": ({"recent": {"streams_not_duplex_total": 7}}, {}, "7 requests"),
    "subset": ({"recent": {"subset_empty_total": 3}}, {}, "3 requests"),
    "protocol": ({"recent": {"violations_total": 2}}, {}, "2 streams"),
    "faults": ({"recent": {"faults_total": 4}}, {}, "4 faults"),
    "objectives": ({"recent": {"objectives_unknown_total": 5}}, {}, "5 requests"),
    "usage": ({"recent": {"usage_beyond_bounds_total@a": 5}}, {}, "a: 5 answers"),
    "cache-salt": ({"recent": {"salt_ignored_total@a": 5}}, {}, "a: 5 answers"),
    "tokens": ({"recent": {"requests_without_tokens_total@r:80 403 from /render: start it otherwise": 5}}, {}, "403 from /render: 5 times"),
    "kv-events": ({}, {"not_precise": OTHER_TOPIC}, f"10.0.0.1:80): {OTHER_TOPIC}"),
    "kv-replay": ({"recent": {"kv_cache_events_replays_failed_total": 2}}, {}, "2 replays without an answer"),
    "cpu-limit": ({"host": {"workers": 8, "cpus": 3}}, {}, "8 workers, 3 CPUs"),
    "shared-memory": ({"shared_memory": {"bytes": 64 << 20, "free_bytes": 3 << 20}}, {}, "3 MiB of 64 MiB"),
    "certificate": ({"certificates": {"metrics": 100_000 + 86_400}, "certificates_soon": ["metrics"]}, {}, "1.0 days left"),
    "rbac": ({"access_refused": {"pods in namespace x": "not allowed to list pods"}}, {}, "not allowed to list pods"),
    "kubernetes-api": ({"access_refused": {"pods in namespace x": "the answer is not an API server's"}}, {}, "not an API server's"),
    "gateway-tls": ({"doctor": {"findings": [OF_DOCTOR]}}, {}, "no transport_socket"),
    "supervisor": ({"supervisor": {"serving": False}}, {}, "does not serve"),
}


def test_an_endpoint_on_trial_is_still_named_as_ejected() -> None:
    (found,) = findings(values(), {"a": endpoint(state="on trial", why="100% of its last 9 answers failed")})
    assert (found.rule, found.severity) == ("endpoints-ejected", "error")
    assert "100% of its last 9" in found.evidence


def test_a_healthy_picker_has_no_finding() -> None:
    assert findings(values(), {"a": endpoint(), "b": endpoint()}) == []


@cases("rule", FAULTS)
def test_each_fault_is_found_with_its_evidence(rule: str) -> None:
    changes, of_endpoint, evidence = FAULTS[rule]
    (found,) = findings(values(**changes), {"a": endpoint(**of_endpoint)})
    assert found.rule == rule
    assert evidence in found.evidence
    assert found.fix


@pytest.mark.parametrize(
    ("reason", "severities"), [("r:80 403 from /x: y", ["error"]), ("r:80 400 from /x: y", ["warning"]), (" no API", [])]
)
def test_a_server_that_renders_nothing_is_an_error_a_refused_body_is_not_and_an_api_without_endpoint_is_nothing(
    reason: str, severities: list[str]
) -> None:
    recent = {f"requests_without_tokens_total@{reason}": 1}
    assert [found.severity for found in findings(values(recent=recent), {"a": endpoint()})] == severities


def test_one_implausible_report_is_no_finding() -> None:
    assert findings(values(recent={"usage_beyond_bounds_total@a": 1}), {"a": endpoint()}) == []


@pytest.mark.parametrize(
    ("why", "reported", "found"), [(NO_EVENTS, 0.0, 0), (NO_EVENTS, 0.4, 1), (NOT_CONNECTED, 0.0, 1), (PARTLY_REUSED, 0.4, 0)]
)
def test_kv_events_are_missing_where_a_server_must_have_sent_some(why: str, reported: float, found: int) -> None:
    each = endpoint(not_precise=why, reported_share=reported)
    assert [finding.rule for finding in findings(values(), {"a": each})] == ["kv-events"] * found


@pytest.mark.parametrize(("tokens", "block"), [(30.0, 16), (250.0, 128), (2000.0, None), (None, 16)])
def test_predictions_of_few_blocks_are_no_evidence_that_a_server_caches_no_prefixes(tokens: float | None, block: int | None) -> None:
    """A server with larger blocks than the picker believes, or a prompt that is a little shorter than it counts, reports none either."""
    scraped = endpoint()["scraped"] | {"cache_block_size": block}
    each = endpoint(scraped={name: value for name, value in scraped.items() if value is not None}, **UNREPORTED)
    assert findings(values(), {"a": each | ({} if tokens is None else {"predicted_tokens": tokens})}) == []


def test_values_that_cannot_be_read_are_one_warning_that_names_them() -> None:
    scraped = {"waiting_requests": 0, "kv_cache_usage": 0}
    partly = endpoint(scraped=scraped, why=UNREAD_VALUES + "vllm:num_requests_running: nan is not a count of 0 or more")
    (found,) = findings(values(), {"a": partly, "b": endpoint()})
    assert (found.rule, found.severity, found.title) == (
        "metrics-absent",
        "warning",
        "1 metrics page with values that cannot be read, which are treated as unknown",
    )
    assert "vllm:num_requests_running: nan is not a count" in found.evidence


def test_a_column_that_no_metric_of_the_engine_fills_is_no_finding() -> None:
    """An empty kvUsageSpec says that the engine has no such metric, so no page of it lacks one."""
    assert findings(values(), {"a": endpoint(scraped={"waiting_requests": 0, "running_requests": 0})}) == []


def test_a_pool_without_endpoints_and_different_block_sizes_are_found() -> None:
    assert [each.rule for each in findings(values(), {})] == ["no-endpoints"]
    other = endpoint(name="c", scraped=endpoint()["scraped"] | {"cache_block_size": 32})
    (found,) = findings(values(), {"a": endpoint(), "b": endpoint(), "c": other})
    assert (found.rule, found.evidence) == ("block-sizes", "2 endpoints with 16 tokens; 32 tokens: c (10.0.0.1:80)")


def test_errors_come_before_warnings_and_one_endpoint_is_singular() -> None:
    found = findings(values(bus_drops=1), {"a": endpoint(state="down"), "b": endpoint(state="stale")})
    assert [each.severity for each in found] == ["error", "warning", "warning"]
    assert found[0].title == "1 endpoint refuses connections"
    assert found[1].title == "1 endpoint has old metrics, so the picker estimates its load"


def test_a_store_that_is_used_is_no_finding_though_nothing_was_heard_yet() -> None:
    found = findings(values(replica_store_connected=True, others={"age_s": 9}), {"a": endpoint()})
    assert "replicas" not in {each.rule for each in found}


def test_advice_about_a_configuration_is_no_finding_of_a_running_picker() -> None:
    warning = "config.yaml:3:1: warning[prefix-outweighs-load]: profile 'default': …"
    assert findings(values(settings={"warnings": [warning]}), {"a": endpoint()}) == []


@pytest.mark.parametrize("recent", [{"handshakes_given_up_total": 9}, {"handshakes_given_up_total": 20, "connections_total": 500}])
def test_a_few_handshakes_that_peers_give_up_are_no_finding(recent: dict[str, int]) -> None:
    assert findings(values(recent=recent), {"a": endpoint()}) == []
