"""How close endpoints are to the target of the stage before, and what filter and scorer make of it."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.candidates import Candidates
from epp.config.findings import ConfigErrors
from epp.config.load import load
from epp.endpoints.topology import LABELS, Places
from tests.epp.plugins.calls import PROFILE, kept, made, only, score
from tests.fakes import candidates, endpoints, request

HOST, RACK, ZONE, REGION = LABELS


def at(host: str = "", rack: str = "", zone: str = "", region: str = "") -> dict[str, str]:
    given = {HOST: host, RACK: rack, ZONE: zone, REGION: region}
    return {label: value for label, value in given.items() if value}


PEER = at("h1", "r1", "z1", "eu")
SITES = candidates(
    count=6,
    labels=[
        at("h1", "r1", "z1", "eu"),
        at("h2", "r1", "z1", "eu"),
        at("h3", "r2", "z1", "eu"),
        at("h4", "r3", "z2", "eu"),
        at("h5", "r4", "z3", "us"),
        {},
    ],
)


def after(peer: Mapping[str, str] | None) -> Any:
    """A request whose stage before went to an endpoint with these labels."""
    r = request()
    r.profile = PROFILE.name
    if peer is not None:
        r.data["peer-endpoint", PROFILE.name] = endpoints(1, labels=[peer])[0]
    return r


def test_the_score_falls_with_the_distance() -> None:
    assert score(made("topology-affinity-scorer"), SITES, after(PEER)) == [1.0, 0.20, 0.05, 0.02, 0.0, 0.0]


def test_without_a_peer_all_score_0() -> None:
    assert score(made("topology-affinity-scorer"), SITES, after(None)) == [0.0] * 6
    assert score(made("topology-affinity-scorer"), SITES, after({})) == [0.0] * 6


@pytest.mark.parametrize(
    ("closest", "expected"), [("host", [0]), ("", [0]), ("rack", [0, 1]), ("zone", [0, 1, 2]), ("region", [0, 1, 2, 3])]
)
def test_the_filter_keeps_what_is_close_enough(closest: str, expected: list[int]) -> None:
    assert kept(made("topology-affinity-filter", minAffinity=closest), SITES, after(PEER)) == expected


@pytest.mark.parametrize("peer", [None, {}, at("elsewhere"), at(zone="z9")])
def test_the_filter_never_leaves_a_request_without_endpoints(peer: Mapping[str, str] | None) -> None:
    assert kept(made("topology-affinity-filter"), SITES, after(peer)) == [0, 1, 2, 3, 4, 5]


def test_filtered_candidates_are_compared_by_their_own_labels() -> None:
    assert score(made("topology-affinity-scorer"), only(SITES, 1, 4), after(PEER)) == [0.20, 0.0]
    assert kept(made("topology-affinity-filter", minAffinity="zone"), only(SITES, 2, 4), after(PEER)) == [0]


def test_labels_of_a_new_endpoint_list_are_read() -> None:
    one = made("topology-affinity-scorer")
    assert score(one, SITES, after(PEER))[0] == 1.0
    assert score(one, candidates(count=2, labels=[at("h9"), at("h1")]), after(PEER)) == [0.0, 1.0]


def test_a_missing_label_is_close_to_nothing() -> None:
    assert score(made("topology-affinity-scorer"), SITES, after(at(region="eu"))) == [0.02, 0.02, 0.02, 0.02, 0.0, 0.0]


def test_the_node_stands_in_for_a_missing_label_of_the_host() -> None:
    places = Places(("rack-unit", RACK, ZONE, REGION))
    pods = candidates(count=2, labels=[{"kubernetes.io/hostname": "n1"}, {"rack-unit": "n2"}])
    peer = endpoints(1, labels=[{"kubernetes.io/hostname": "n1"}])[0]
    assert places.level(peer, pods).tolist() == [0, 4]


SITE = st.builds(at, *[st.sampled_from(["", "a", "b"]) for _ in range(4)])


@given(peer=SITE, sites=st.lists(SITE, min_size=1, max_size=8))
def test_the_level_is_the_tightest_shared_label(peer: dict[str, str], sites: list[dict[str, str]]) -> None:
    def by_hand(site: dict[str, str]) -> int:
        return next((n for n, label in enumerate(LABELS) if label in peer and peer.get(label) == site.get(label)), 4)

    here: Candidates = candidates(count=len(sites), labels=sites)
    levels = Places().level(endpoints(1, labels=[peer])[0], here)
    assert levels.tolist() == [by_hand(site) for site in sites]


CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: core-metrics-extractor
- type: topology-extractor
  name: sites
  parameters: {rack: example.com/rack}
- type: topology-affinity-scorer
  parameters: {topologyProducerName: %s}
- type: topology-affinity-filter
  parameters: {topologyProducerName: sites, minAffinity: rack}
- type: disagg-profile-handler
- type: always-disagg-pd-decider
schedulingProfiles:
- name: prefill
  plugins: [{pluginRef: topology-affinity-filter}, {pluginRef: topology-affinity-scorer}]
- name: decode
"""


def test_filter_and_scorer_read_the_labels_of_the_named_extractor() -> None:
    config = load(CONFIG % "sites", "test", allow_experimental=True)
    racks = candidates(count=2, labels=[{"example.com/rack": "7"}, {"example.com/rack": "8"}])
    peer = after({"example.com/rack": "8"})
    assert score(config.pipeline.plugins["topology-affinity-scorer"], racks, peer) == [0.0, 0.2]
    assert kept(config.pipeline.plugins["topology-affinity-filter"], racks, peer) == [1]
    assert not [w for w in config.warnings if "sites" in w.message]


def test_the_only_extractor_is_used_without_a_name() -> None:
    text = CONFIG.replace("parameters: {topologyProducerName: %s}", "parameters: {}")
    scorer = load(text, "test", allow_experimental=True).pipeline.plugins["topology-affinity-scorer"]
    racks = candidates(count=1, labels=[{"example.com/rack": "8"}])
    assert score(scorer, racks, after({"example.com/rack": "8"})) == [0.2]


@pytest.mark.parametrize(
    ("named", "why"),
    [("nowhere", "undefined plugin 'nowhere'"), ("core-metrics-extractor", "topologyProducerName: this plugin names no labels of places")],
)
def test_a_name_that_is_no_topology_extractor_is_refused(named: str, why: str) -> None:
    with pytest.raises(ConfigErrors, match=why) as refused:
        load(CONFIG % named, "test", allow_experimental=True)
    assert ":10:" in str(refused.value)
