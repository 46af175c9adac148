"""Which revision of a DisaggregatedSet gets a request. The expected shares are computed by hand."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from epp.candidates import Candidates, EndpointList, Snapshot
from epp.decision.decision import SERVED, Decision, Response
from tests.epp.plugins.calls import made, only
from tests.fakes import FakeServices, candidates, request

SCREENER = "disaggregatedset-rollout-screener"
REVISION = "disaggregatedset.x-k8s.io/revision"
ROLE = "disaggregatedset.x-k8s.io/role"
HEADERS = [
    {"name": "revision", "headerName": "X-Revision", "labelKey": REVISION, "mode": "strict"},
    {"name": "slice", "headerName": "x-slice", "labelKey": "slice", "mode": "prefer"},
]


def pods(of: str, prefill: int, decode: int, **more: str) -> list[dict[str, str]]:
    labels = {"set": "a", REVISION: of, **more}
    return [labels | {ROLE: role} for role, count in (("prefill", prefill), ("decode", decode)) for _ in range(count)]


def pool(*groups: list[dict[str, str]], **more: Any) -> Candidates:
    labels = [labels for group in groups for labels in group]
    return candidates(count=len(labels), labels=labels, **more)


def screener(mode: str = "max-role", roles: tuple[str, ...] = ("prefill", "decode"), **gating: Any) -> Any:
    gating = {"mode": mode, "requiredRoles": list(roles), **gating}
    return made(SCREENER, scope={"labelSelector": "set=a"}, revisionGating=gating, headerSelectors=HEADERS)


def revisions(of: Any, c: Candidates, headers: Mapping[str, str] | None = None) -> list[str]:
    """The revisions of the candidates that stay, each once."""
    mask = of.screen(request(headers=headers or {}), c)
    return sorted({e.labels.get(REVISION, "") for e, stays in zip(c.endpoints, mask, strict=True) if stays})


@pytest.mark.parametrize(("mode", "expected"), [("max-role", {"A": 9 / 10, "B": 1 / 10}), ("sum", {"A": 11 / 13, "B": 2 / 13})])
def test_shares_follow_the_pods_of_the_largest_role_or_of_all_roles(mode: str, expected: dict[str, float]) -> None:
    assert screener(mode).shares(pool(pods("A", 2, 9), pods("B", 1, 1)).snapshot) == pytest.approx(expected)


def test_the_first_role_weighs_if_roles_have_equally_many_pods() -> None:
    c = pool(pods("A", 1, 3), pods("B", 3, 1))
    assert screener(roles=("prefill", "decode")).shares(c.snapshot) == {"A": 0.25, "B": 0.75}
    assert screener(roles=("decode", "prefill")).shares(c.snapshot) == {"A": 0.75, "B": 0.25}


def test_pods_of_incomplete_revisions_do_not_decide_which_role_is_the_largest() -> None:
    c = pool(pods("A", 4, 2), pods("B", 1, 2), pods("C", 0, 9))
    assert screener().shares(c.snapshot) == {"A": 0.8, "B": 0.2}


def test_a_request_gets_the_endpoints_of_one_drawn_revision() -> None:
    c, plugin = pool(pods("A", 2, 9), pods("B", 1, 1)), screener()
    drawn = Counter(tuple(revisions(plugin, c)) for _ in range(2000))
    assert set(drawn) == {("A",), ("B",)}
    assert drawn["A",] == pytest.approx(1800, abs=90)


def test_a_revision_without_a_pod_of_each_role_gets_no_request() -> None:
    c, plugin = pool(pods("A", 1, 1), pods("B", 0, 9)), screener()
    assert all(revisions(plugin, c) == ["A"] for _ in range(50))
    assert revisions(plugin, c, {"x-revision": "B"}) == []
    assert revisions(screener(), pool(pods("B", 0, 9))) == []


def test_pods_outside_the_scope_or_without_labels_do_not_count() -> None:
    c = pool(pods("A", 1, 1), pods("B", 1, 1, set="b"), [{"set": "a", ROLE: "decode"}, {}])
    assert screener().shares(c.snapshot) == {"A": 1.0}


def test_only_revisions_of_the_candidates_are_drawn() -> None:
    c, plugin = pool(pods("A", 1, 9), pods("B", 1, 1)), screener()
    assert all(revisions(plugin, only(c, 10, 11)) == ["B"] for _ in range(50))


def test_a_pod_with_several_ports_counts_once() -> None:
    c = pool(pods("A", 1, 2), pods("B", 1, 1))
    endpoints = list(c.endpoints)
    endpoints[2].host = endpoints[1].host
    none = np.zeros(len(endpoints), dtype=bool)
    snapshot = Snapshot(EndpointList(endpoints), {}, fresh=~none, known=~none, down=none, inflight_at_scrape=np.zeros(5))
    assert screener().shares(snapshot) == {"A": 0.5, "B": 0.5}


def test_a_pod_that_is_down_does_not_count_unless_nothing_is_left() -> None:
    groups = (pods("A", 1, 1), pods("B", 1, 1))
    plugin = screener()
    assert plugin.shares(pool(*groups, down=[True, False, False, False]).snapshot) == {"B": 1.0}
    assert plugin.shares(pool(*groups, down=[True, False, True, False]).snapshot) == {"A": 0.5, "B": 0.5}
    assert plugin.shares(pool(*groups).snapshot) == {"A": 0.5, "B": 0.5}


def test_a_strict_header_chooses_the_revision_and_fails_closed() -> None:
    c, plugin = pool(pods("A", 1, 9), pods("B", 1, 1)), screener()
    assert all(revisions(plugin, c, {"x-revision": "B"}) == ["B"] for _ in range(50))
    assert revisions(plugin, c, {"x-revision": "none"}) == []
    assert plugin._no_match.values == {("revision",): 1}


def test_a_preferred_header_keeps_all_endpoints_of_the_drawn_revision() -> None:
    c = pool(pods("A", 1, 1, slice="1"), pods("A", 1, 1, slice="2"))
    assert screener().screen(request(headers={"x-slice": "1"}), c).all()


def test_disabled_gating_keeps_all_revisions_and_obeys_strict_headers() -> None:
    c, plugin = pool(pods("A", 1, 1), pods("B", 0, 1)), screener("disabled", ())
    assert revisions(plugin, c) == ["A", "B"]
    assert revisions(plugin, c, {"x-revision": "B"}) == ["B"]


def test_the_older_form_of_the_roles_means_the_same() -> None:
    older = made(
        SCREENER, scope={"labelSelector": "set in (a)"}, revisionGating={"mode": "sum", "requireRoles": {"values": ["prefill", "decode"]}}
    )
    assert older.shares(pool(pods("A", 1, 1), pods("B", 0, 9)).snapshot) == {"A": 1.0}


def test_the_response_names_revision_and_slice_of_the_endpoint_that_served() -> None:
    c = pool(pods("A", 0, 1, slice="1"), pods("A", 0, 1, slice="2"))
    decision = Decision(c.endpoints, {}, "decode")
    response = Response(200)
    screener().response_received(request(), decision, response)
    assert response.set_headers == {"x-revision": "A", "x-slice": "1"}
    response.gateway = {SERVED: c.endpoints[1].address}
    screener().response_received(request(), decision, response)
    assert response.set_headers == {"x-revision": "A", "x-slice": "2"}


@pytest.mark.parametrize(
    ("gating", "fault"),
    [
        ({"mode": "sum"}, "revisionGating.requiredRoles: is empty"),
        ({"mode": "sum", "requireRoles": {}}, "revisionGating.requireRoles.values: is empty"),
        ({"mode": "sum", "requiredRoles": ["a", "a"]}, "names a role twice"),
        ({"mode": "sum", "requiredRoles": ["a"], "requireRoles": {"values": ["a"]}}, "remove it"),
    ],
)
def test_roles_must_be_named_once(gating: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        made(SCREENER, scope={"labelSelector": "set=a"}, revisionGating=gating)


@pytest.mark.parametrize("field", ["name", "headerName"])
def test_two_header_selectors_with_one_name_or_header_are_refused(field: str) -> None:
    other = {**HEADERS[1], field: HEADERS[0][field].lower()}
    with pytest.raises(ValueError, match=rf"headerSelectors\[1\].{field}: .* is given twice"):
        made(SCREENER, scope={"labelSelector": "set=a"}, revisionGating={"mode": "disabled"}, headerSelectors=[HEADERS[0], other])


@pytest.mark.parametrize("text", [" ", "a=1,", "a=-"])
def test_a_wrong_selector_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"scope\.labelSelector: .*(does not start with a term|is not a label)"):
        made(SCREENER, scope={"labelSelector": text}, revisionGating={"mode": "disabled"})


def test_the_page_shows_the_share_of_each_revision_until_it_is_gone() -> None:
    plugin, services = screener(), FakeServices()
    plugin.start(services)
    plugin.shares(pool(pods("A", 1, 1), pods("B", 1, 3), pods("C", 0, 9)).snapshot)
    shown = services.shown["disaggregatedset_revision_gating_share"]
    shares = {revision: share for (_, revision), share in shown.values.items()}
    assert shares == {**plugin.shares(pool(pods("A", 1, 1), pods("B", 1, 3)).snapshot), "C": 0.0}
    assert shares["A"] + shares["B"] == 1.0
    plugin.shares(pool(pods("B", 1, 3)).snapshot)
    assert {revision: weight for (_, revision), weight in shown.weights.items()} == {"A": 0.0, "B": 1.0, "C": 0.0}
    assert shown.values[next(key for key in shown.values if key[1] == "B")] == 1.0
