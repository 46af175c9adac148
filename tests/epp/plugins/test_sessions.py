"""Sessions stay on their endpoint: by a token that the client carries, or by bindings that all workers share."""

import base64

import msgspec
import numpy as np
import pytest

from epp.candidates import Candidates, Endpoint, EndpointList, Snapshot
from epp.decision.decision import Decision, ProfileRun, Response
from epp.plugins.headers import AGENT
from epp.plugins.sessions import _affinity
from epp.plugins.sessions._affinity import Bindings
from epp.plugins.sessions.identifier import SessionId, cookie
from epp.plugins.sessions.pinned import MultiClusterSessionAffinityFilter, SessionAffinityFilter, SessionAffinityScorer
from epp.prefix.blocks import WIDE
from epp.request import Request, Tenant
from shm.prefix_index import IndexReader, IndexSchema
from shm.prefix_writer import IndexWriter
from tests.epp.plugins.calls import PROFILE
from tests.fakes import FakeServices, candidates, request
from tests.modes import interpreted_only
from tests.shm.memory import region_for


def made(cls: type, services: FakeServices | None = None, **params: object):
    plugin = cls("s", msgspec.convert(params, cls.Params))
    plugin.start(services or FakeServices())
    return plugin


def by_id(cls: type = SessionAffinityFilter, services: FakeServices | None = None, **config: object):
    return made(cls, services, strategy="session_id", sessionIdConfig=config)


def of(session: str, now: float = 1000.0, **headers: str) -> Request:
    return request(headers={"x-session-id": session, **headers}, now=now)


def four(**more: object) -> Candidates:
    return candidates(count=4, **more)


def only(c: Candidates, *rows: int) -> Candidates:
    return c.keep(np.isin(np.arange(len(c)), rows))


def sent_to(c: Candidates, index: int, profile: str = "default", **others: ProfileRun) -> Decision:
    run = ProfileRun(c, c.zeros(), (index,))
    return Decision(run.targets, {profile: run, **others}, profile)


def kept(plugin: SessionAffinityFilter, r: Request, c: Candidates) -> list[str]:
    mask = plugin.keep(r, c, PROFILE)
    return [e.name for e, stays in zip(c.endpoints, mask, strict=True) if stays]


def goes(plugin: SessionAffinityFilter, r: Request, c: Candidates, index: int) -> list[str]:
    """Sends one request through the filter and to the candidate at `index`. Returns the names of the kept endpoints."""
    names = kept(plugin, r, c)
    plugin.before_send(r, sent_to(c, index))
    return names


ALL = ["pod-0", "pod-1", "pod-2", "pod-3"]
TOKEN = base64.b64encode(b"default/pod-2").decode()


# The client carries the endpoint


def test_the_answer_names_the_endpoint_and_the_next_request_goes_there() -> None:
    plugin, response = made(SessionAffinityFilter), Response(200)
    assert kept(plugin, request(), four()) == ALL
    plugin.response_received(request(), sent_to(four(), 2), response)
    assert response.set_headers == {"x-session-token": TOKEN}
    assert kept(plugin, request(headers=response.set_headers), four()) == ["pod-2"]


def test_two_workers_resolve_a_token_to_the_same_endpoint() -> None:
    for _ in range(2):
        assert kept(made(SessionAffinityFilter), request(headers={"x-session-token": TOKEN}), four()) == ["pod-2"]


def test_the_scorer_gives_the_pinned_endpoint_1_and_the_others_0() -> None:
    scorer = made(SessionAffinityScorer)
    assert scorer.score(request(), four(), PROFILE) is None
    scores = scorer.score(request(headers={"x-session-token": TOKEN}), four(), PROFILE)
    assert scores.tolist() == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("token", ["", "!", "not base64", TOKEN[:-1], "/w==", base64.b64encode(b"default/pod-9").decode()])
def test_an_invalid_or_unknown_token_means_no_affinity(token: str) -> None:
    assert kept(made(SessionAffinityFilter), request(headers={"x-session-token": token}), four()) == ALL


def test_a_pinned_endpoint_that_was_filtered_out_or_is_down_does_not_pin() -> None:
    plugin, r = made(SessionAffinityFilter), request(headers={"x-session-token": TOKEN})
    assert kept(plugin, r, only(four(), 0, 1)) == ["pod-0", "pod-1"]
    assert kept(plugin, r, only(four(), 0, 2)) == ["pod-2"]
    assert kept(plugin, r, four(down=[False, False, True, False])) == ALL


def test_the_headers_name_is_configurable_in_any_case() -> None:
    plugin = made(SessionAffinityFilter, encodedEndpointHeaderConfig={"header": " X-Mine "})
    assert kept(plugin, request(headers={"x-mine": TOKEN}), four()) == ["pod-2"]


def test_the_target_of_a_named_profile_can_be_pinned() -> None:
    c, response = four(), Response(200)
    prefill = ProfileRun(only(c, 1, 3), np.zeros(2), (1,))
    plugin = made(SessionAffinityFilter, profileName="prefill")
    plugin.response_received(request(), sent_to(c, 0, "decode", prefill=prefill), response)
    assert base64.b64decode(response.set_headers["x-session-token"]) == b"default/pod-3"
    nothing = Response(200)
    plugin.response_received(request(), sent_to(c, 0, "decode"), nothing)
    assert nothing.set_headers == {}


def test_an_error_pins_no_session() -> None:
    plugin = made(SessionAffinityFilter)
    for status, pins in ((404, False), (503, False), (200, True)):
        response = Response(status)
        plugin.response_received(request(), sent_to(four(), 0, "decode"), response)
        assert bool(response.set_headers) is pins


def test_a_new_endpoint_list_is_read() -> None:
    plugin, r = made(SessionAffinityFilter), request(headers={"x-session-token": TOKEN})
    assert kept(plugin, r, four()) == ["pod-2"]
    assert kept(plugin, r, candidates(count=2)) == ["pod-0", "pod-1"]


# Bindings


def test_a_session_is_bound_to_the_target_of_its_first_request_and_others_are_free() -> None:
    plugin, c = by_id(), four()
    assert goes(plugin, of("a"), c, 1) == ALL
    assert goes(plugin, of("a"), c, 1) == ["pod-1"]
    assert kept(plugin, of("b"), c) == ALL
    assert kept(plugin, request(now=1000.0), c) == ALL


def test_all_workers_follow_a_binding_of_one_worker() -> None:
    shared = FakeServices()
    one, other = by_id(services=shared), by_id(services=shared)
    goes(one, of("a"), four(), 3)
    assert goes(other, of("a"), four(), 3) == ["pod-3"]
    assert len(one.strategy) == len(other.strategy) == 1


def test_a_binding_counts_as_one_block_of_its_endpoint() -> None:
    shared = FakeServices()
    plugin = by_id(services=shared)
    for number in range(64):
        goes(plugin, of(str(number)), four(), 3)
    assert len(shared.held) == 64 and not any(learned & WIDE for learned in shared.held)


def test_the_data_that_is_kept_of_a_request_is_declared() -> None:
    plugin, r = by_id(), of("a")
    goes(plugin, r, four(), 1)
    assert set(r.data) == {datum.name for datum in plugin.keeps}


def test_scorer_and_filter_for_one_profile_share_their_bindings() -> None:
    shared = FakeServices()
    goes(by_id(services=shared), of("a"), four(), 3)
    scores = by_id(SessionAffinityScorer, shared).score(of("a"), four(), PROFILE)
    assert scores.tolist() == [0.0, 0.0, 0.0, 1.0]


def test_all_workers_agree_on_a_session_that_was_bound_twice_at_once() -> None:
    shared = FakeServices()
    workers = [by_id(services=shared) for _ in range(3)]
    requests = [of("a") for _ in workers]
    for worker, r in zip(workers, requests, strict=True):  # no worker knows the others' bindings yet
        assert kept(worker, r, four()) == ALL
    for index, (worker, r) in enumerate(zip(workers, requests, strict=True)):
        worker.before_send(r, sent_to(four(), index))
    agreed = {tuple(kept(worker, of("a"), four())) for worker in workers}
    assert len(agreed) == 1 and len(agreed.pop()) == 1


def test_a_session_moves_only_if_its_endpoint_is_absent_and_all_workers_follow() -> None:
    shared = FakeServices()
    one, other = by_id(services=shared), by_id(services=shared)
    goes(one, of("a"), four(), 2)
    overruled = of("a")
    kept(one, overruled, four())
    one.before_send(overruled, sent_to(four(), 0))
    assert kept(other, of("a"), four()) == ["pod-2"]  # picking another endpoint does not move the binding
    without = only(four(), 0, 1)
    assert goes(one, of("a"), without, 1) == ["pod-0", "pod-1"]
    assert kept(other, of("a"), without) == ["pod-1"]


def test_after_a_move_the_newer_binding_wins_once_its_epoch_has_begun() -> None:
    shared = FakeServices()
    one, other = by_id(services=shared, evictionTtlSeconds=100), by_id(services=shared, evictionTtlSeconds=100)
    goes(one, of("a", 1000.0), four(), 2)
    goes(one, of("a", 1060.0), only(four(), 0, 1), 1)
    assert kept(one, of("a", 1060.0), four()) == kept(other, of("a", 1060.0), four()) == ["pod-1"]


def test_a_down_endpoint_counts_as_absent() -> None:
    plugin = by_id()
    goes(plugin, of("a"), four(), 2)
    down = four(down=[False, False, True, False])
    assert goes(plugin, of("a"), down, 0) == ALL
    assert kept(plugin, of("a"), down) == ["pod-0"]


@pytest.mark.parametrize(("idle_s", "bound"), [(99.0, True), (100.0, True), (151.0, False)])
def test_an_unused_binding_lives_for_1_to_1_5_times_its_time_to_live(idle_s: float, bound: bool) -> None:
    shared = FakeServices()
    for start in (1000.0, 1010.0, 1049.0):
        one, other = (by_id(services=shared, evictionTtlSeconds=100) for _ in range(2))
        session = f"from {start}"
        goes(one, of(session, start), four(), 1)
        assert kept(other, of(session, start + idle_s), four()) == (["pod-1"] if bound else ALL)


def test_use_keeps_a_binding_alive() -> None:
    shared = FakeServices()
    one = by_id(services=shared, evictionTtlSeconds=100)
    goes(one, of("a", 1000.0), four(), 1)
    for now in range(1060, 2000, 60):
        assert goes(one, of("a", float(now)), four(), 1) == ["pod-1"]


def test_a_worker_uses_its_own_bindings_if_the_index_lost_them() -> None:
    shared = FakeServices()
    plugin = by_id(services=shared)
    goes(plugin, of("a", 1000.0), four(), 1)
    shared.held.clear()
    assert kept(plugin, of("a", 1300.0), four()) == ["pod-1"]
    assert kept(plugin, of("a", 1301.0), four()) == ALL


def test_a_reused_owner_id_is_another_endpoint() -> None:
    shared = FakeServices()
    plugin, c = by_id(services=shared), candidates(count=1)
    goes(plugin, of("a"), c, 0)
    shared.held.clear()  # as the sweep of the index does when the endpoint leaves
    newcomer = EndpointList([Endpoint(name=n, namespace="x", host=h, port=1, owner=o) for n, h, o in (("n", "h", 1), ("m", "i", 2))])
    yes, no = np.array([True, True]), np.array([False, False])
    later = Snapshot(newcomer, {}, fresh=yes, known=yes, down=no, inflight_at_scrape=np.zeros(2))
    assert kept(plugin, of("a"), Candidates(later, np.zeros(2))) == ["n", "m"]


@interpreted_only("the test lowers a limit")
def test_local_bindings_are_swept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_affinity, "SESSIONS_MAX", 3)
    services = FakeServices()
    plugin = by_id(services=services, evictionTtlSeconds=100, evictionSweepSeconds=7)
    for number in range(5):
        goes(plugin, of(f"s{number}", 1000.0 + number), four(), 0)
    assert len(plugin.strategy) == 3
    ((period, sweep),) = services.periodic
    assert period == 7
    goes(plugin, of("late", 1103.5), four(), 0)  # now s3 is 100.5 s old, s4 99.5 s
    sweep()
    assert len(plugin.strategy) == 2


def test_bindings_for_different_profiles_are_separate() -> None:
    shared = FakeServices()
    decode = made(SessionAffinityFilter, shared, strategy="session_id")
    prefill = made(SessionAffinityFilter, shared, strategy="session_id", profileName="prefill")
    c = four()
    run = ProfileRun(c, c.zeros(), (3,))
    r = of("a")
    kept(decode, r, c)
    decode.before_send(r, sent_to(c, 0, prefill=run))
    r = of("a")
    kept(prefill, r, c)
    prefill.before_send(r, sent_to(c, 0, prefill=run))
    assert kept(decode, of("a"), c) == ["pod-0"]
    assert kept(prefill, of("a"), c) == ["pod-3"]


def test_a_tenant_neither_finds_nor_makes_the_binding_of_another_tenants_session() -> None:
    shared = FakeServices()
    one, other = by_id(services=shared), by_id(services=shared)

    def of_tenant(name: str, session: str = "a") -> Request:
        r = of(session)
        r.tenant = Tenant(name)
        return r

    assert goes(one, of_tenant("acme"), four(), 2) == ALL
    for plugin in (one, other):
        assert kept(plugin, of_tenant("acme"), four()) == ["pod-2"]
        assert kept(plugin, of_tenant("bee"), four()) == kept(plugin, of("a"), four()) == ALL
    assert goes(one, of_tenant("acme 4"), four(), 1) == ALL
    assert kept(other, of_tenant("acme", "4 a"), four()) == ALL


def test_sources_are_tried_in_order_and_attributes_are_declared() -> None:
    sources = [{"header": "X-First"}, {"attribute": "SessionIDDataKey", "producer": "p"}, {"attribute": "agent-identity"}]
    plugin, producer = by_id(sources=sources), SessionId("p", SessionId.Params(header_name="x-second"))
    assert list(plugin.consumes) == [*producer.produces, AGENT]
    first, second, third = (request(now=1000.0, headers=h) for h in ({"x-first": " 1 "}, {"x-second": "2"}, {"x-first": " "}))
    third[AGENT] = "3"
    for index, r in enumerate((first, second, third)):
        producer.produce(r, four())
        assert goes(plugin, r, four(), index) == ALL
    again = request(headers={"x-first": "1", "x-second": "2"}, now=1000.0)
    producer.produce(again, four())
    assert kept(plugin, again, four()) == ["pod-0"]


@pytest.mark.parametrize("source", [{}, {"header": "a", "attribute": "b"}])
def test_a_source_is_a_header_or_an_attribute(source: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"^sessionIdConfig\.sources\[1\]: give exactly one of header and attribute$"):
        by_id(sources=[{"header": "x"}, source])
    made(SessionAffinityFilter, sessionIdConfig={"sources": [source]})  # the part of the other strategy is not checked


def test_times_of_0_mean_the_defaults() -> None:
    services = FakeServices()
    by_id(services=services, evictionTtlSeconds=0, evictionSweepSeconds=0)
    assert services.periodic[0][0] == 10.0


def test_the_filter_for_several_clusters_does_the_same() -> None:
    assert kept(made(MultiClusterSessionAffinityFilter), request(headers={"x-session-token": TOKEN}), four()) == ["pod-2"]


def test_a_session_in_use_needs_one_look_up_in_the_index() -> None:
    lookups = []

    class Counting(FakeServices):
        def match(self, hashes):
            lookups.append(hashes)
            return super().match(hashes)

    plugin = by_id(services=Counting())
    assert isinstance(plugin.strategy, Bindings)
    goes(plugin, of("a"), four(), 1)
    lookups.clear()
    kept(plugin, of("a"), four())
    assert len(lookups) == 1


class WithIndex(FakeServices):
    """Services with a real index. What is learned is visible at once."""

    def __init__(self, owners: int) -> None:
        super().__init__()
        schema = IndexSchema(4096)
        region = region_for(schema)
        self._writer, self._reader = IndexWriter(schema, region), IndexReader(schema, region)
        self.owners = [self._writer.new_owner() for _ in range(owners)]

    def match(self, hashes):
        return self._reader.match(hashes)

    def learn(self, hashes, owner: int) -> None:
        self._writer.insert(hashes, owner, 0)


def test_a_restarted_worker_finds_the_bindings_in_the_shared_index() -> None:
    shared = WithIndex(4)
    endpoint_list = EndpointList(
        [Endpoint(name=f"pod-{i}", namespace="n", host="h", port=i, slot=i, owner=o) for i, o in enumerate(shared.owners)]
    )
    yes, no = np.ones(4, dtype=bool), np.zeros(4, dtype=bool)
    c = Candidates(Snapshot(endpoint_list, {}, fresh=yes, known=yes, down=no, inflight_at_scrape=np.zeros(4)), np.zeros(4))
    one = by_id(services=shared)
    for number in range(100):
        assert goes(one, of(f"s{number}"), c, number % 4) == ALL
    successor = by_id(services=shared)
    assert [kept(successor, of(f"s{number}"), c) for number in range(100)] == [[f"pod-{number % 4}"] for number in range(100)]


# The source of the id


def test_the_session_id_is_the_value_of_a_header_or_a_cookie() -> None:
    by_header, by_cookie = (SessionId("h", SessionId.Params(header_name=" X-Sid ")), SessionId("c", SessionId.Params(cookie_name="sid")))
    r = request(headers={"x-sid": " one ", "cookie": "a=b; sid=two=2; sid=three"})
    for producer, expected in ((by_header, "one"), (by_cookie, "two=2")):
        producer.produce(r, four())
        assert r[producer.produces[0]] == expected
    nothing = request()
    by_cookie.produce(nothing, four())
    assert nothing[by_cookie.produces[0]] == ""


@pytest.mark.parametrize(
    ("header", "value"), [("", ""), ("sid", ""), ("xsid=1; si=2", ""), (" sid = 1", ""), ("sid=1", "1"), ("a;sid=", "")]
)
def test_cookies_are_parsed_as_pairs(header: str, value: str) -> None:
    assert cookie(header, "sid") == value


@pytest.mark.parametrize("params", [{}, {"headerName": " "}, {"headerName": "a", "cookieName": "b"}])
def test_exactly_one_source_of_the_id_is_required(params: dict[str, str]) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"^give exactly one of headerName and cookieName"):
        msgspec.convert(params, SessionId.Params)
