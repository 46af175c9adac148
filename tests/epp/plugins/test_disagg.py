"""Disaggregated serving: which stages run, which endpoints serve them, and which headers and counters result."""

import pytest

from epp.errors import Cause, Refused
from epp.plugin import NoParams
from epp.plugins.deciders.simple import Always
from epp.plugins.filters.roles import DecodeFilter, PrefillFilter
from epp.plugins.producers.approx_prefix import ApproximatePrefix
from epp.prefix.match import APPROXIMATE
from tests.epp.plugins.stages import (
    ALL_ROLES,
    DECIDED,
    ENCODERS,
    NOTHING_COUNTED,
    PREFILLER,
    STEERING,
    UNSERVED,
    Bench,
    Fixed,
    handler,
    servers,
)
from tests.fakes import request


@pytest.mark.parametrize(
    ("encode", "prefill", "kind"),
    [(False, False, "decode-only"), (False, True, "prefill-decode"), (True, False, "encode-decode"), (True, True, "encode-prefill-decode")],
)
def test_the_deciders_choose_the_stages_and_the_decision_is_counted_once(encode: bool, prefill: bool, kind: str) -> None:
    deciders = {"encode": Fixed(encode), "prefill": Fixed(prefill)}
    bench = Bench(handler(deciders={"encode": "e", "prefill": "p"}), **deciders)
    decision = bench.decide(servers(*ALL_ROLES), request(target_model="llama"))
    assert [target.name for target in decision.targets] == ["pod-0"]
    assert decision.primary == "decode"
    assert decision.headers.get(PREFILLER) == ("10.0.0.2:8000" if prefill else None)
    encoders = decision.headers.get(ENCODERS)
    assert sorted(encoders.split(",")) == ["10.0.0.3:8000", "10.0.0.4:8000"] if encode else encoders is None  # type: ignore[union-attr]
    assert [name for name in STEERING if (name in decision.headers) == (name in decision.removed_headers)] == []
    assert bench.counted(DECIDED) == {("llama", kind): 1}
    assert bench.counted(UNSERVED) == NOTHING_COUNTED
    assert [decider.calls for decider in deciders.values()] == [["pod-0"], ["pod-0"]]


def test_a_request_without_a_model_is_counted_as_unknown() -> None:
    bench = Bench(handler(), ("decode",))
    bench.decide(servers("decode"), request(target_model=""))
    assert bench.counted(DECIDED) == {("unknown", "decode-only"): 1}


def test_without_deciders_only_decode_runs() -> None:
    decision = Bench(handler()).decide(servers(*ALL_ROLES))
    assert list(decision.runs) == ["decode"]


def test_a_stage_without_a_profile_does_not_run() -> None:
    bench = Bench(handler(deciders={"encode": "e", "prefill": "p"}), ("decode",), encode=Fixed(True), prefill=Fixed(True))
    assert list(bench.decide(servers("decode")).runs) == ["decode"]


def test_without_a_decode_endpoint_the_request_is_refused_and_the_deciders_are_not_called() -> None:
    decider = Fixed(True)
    bench = Bench(handler(deciders={"prefill": "p"}), ("decode", "prefill"), prefill=decider)
    with pytest.raises(Refused) as refused:
        bench.decide(servers("prefill"))
    assert refused.value.cause is Cause.NO_ENDPOINT_LEFT
    assert decider.calls == []
    assert bench.counted(DECIDED) == NOTHING_COUNTED


@pytest.mark.parametrize("order", ["prefill-first", "Prefill_First", "PREFILLFIRST", "prefill"])
def test_prefill_first_always_prefills_and_decode_sees_the_prefill_target(order: str) -> None:
    decider = Fixed(True)
    bench = Bench(handler(stageOrder=order, deciders={"encode": "e"}), encode=decider)
    decision = bench.decide(servers(*ALL_ROLES))
    assert list(decision.runs) == ["prefill", "encode", "decode"]
    assert bench.scorer.seen == [("prefill", None), ("encode", None), ("decode", "pod-1")]
    assert decider.calls == [None]
    assert decision.headers[PREFILLER] == "10.0.0.2:8000"
    assert bench.counted(DECIDED) == {("m", "encode-prefill-decode"): 1}


def test_prefill_first_without_a_prefill_profile_runs_decode_alone() -> None:
    decision = Bench(handler(stageOrder="prefill-first"), ("decode",)).decide(servers("decode"))
    assert (list(decision.runs), decision.headers) == (["decode"], {})


@pytest.mark.parametrize("order", ["", "decode", "decode-first", "DECODE_FIRST"])
def test_the_second_profile_sees_the_target_of_the_first_as_peer_and_the_first_sees_none(order: str) -> None:
    bench = Bench(handler(stageOrder=order, deciders={"prefill": "p"}), ("decode", "prefill"), prefill=Always("p", NoParams()))
    bench.decide(servers("prefill", "decode"))
    assert bench.scorer.seen == [("decode", None), ("prefill", "pod-1")]


@pytest.mark.parametrize("order", ["decode-first", "prefill-first"])
def test_without_a_prefill_endpoint_the_decode_server_prefills_and_this_is_counted_and_logged(order: str) -> None:
    params = {} if order == "prefill-first" else {"deciders": {"prefill": "p"}}
    bench = Bench(handler(stageOrder=order, **params), ("decode", "prefill"), prefill=Fixed(True))
    decision = bench.decide(servers("decode"))
    assert [target.name for target in decision.targets] == ["pod-0"]
    assert PREFILLER not in decision.headers and PREFILLER in decision.removed_headers
    assert bench.counted(DECIDED) == {("m", "decode-only"): 1}
    assert bench.counted(UNSERVED) == {("prefill", "skipped"): 1}
    assert "decode servers compute prompts themselves" in bench.services.warned[0]


@pytest.mark.parametrize("order", ["decode-first", "prefill-first"])
def test_a_request_without_a_prefill_endpoint_can_be_refused(order: str) -> None:
    params = {} if order == "prefill-first" else {"deciders": {"prefill": "p"}}
    bench = Bench(handler(stageOrder=order, onNoPrefill="refuse", **params), ("decode", "prefill"), prefill=Fixed(True))
    with pytest.raises(Refused) as refused:
        bench.decide(servers("decode"))
    assert refused.value.cause is Cause.NO_ENDPOINT_LEFT
    assert bench.counted(DECIDED) == NOTHING_COUNTED
    assert bench.counted(UNSERVED) == {("prefill", "refused"): 1}
    assert "requests are refused" in bench.services.warned[0]


def test_a_request_without_a_prefill_stage_is_not_refused_for_lack_of_prefill_endpoints() -> None:
    bench = Bench(handler(onNoPrefill="refuse", deciders={"prefill": "p"}), ("decode", "prefill"), prefill=Fixed(False))
    assert bench.decide(servers("decode")).primary == "decode"


def test_without_an_encode_endpoint_the_request_goes_on_and_this_is_counted() -> None:
    bench = Bench(handler(deciders={"encode": "e"}), ("decode", "encode"), encode=Fixed(True))
    decision = bench.decide(servers("decode"))
    assert decision.removed_headers == STEERING
    assert bench.counted(UNSERVED) == {("encode", "skipped"): 1}


def test_profiles_may_have_other_names_and_prefixes_are_learned_at_the_prefill_target() -> None:
    producer = ApproximatePrefix(APPROXIMATE, ApproximatePrefix.Params())
    bench = Bench(
        handler(profiles={"decode": "d", "prefill": "p"}, deciders={"prefill": "x"}),
        ("d", "p"),
        producer,
        filters=(DecodeFilter, PrefillFilter),
        prefill=Fixed(True),
    )
    r = request(b"x" * 1000)
    candidates = servers("decode", "decode", "prefill")
    producer.produce(r, candidates)
    decision = bench.decide(candidates, r)
    assert decision.prefill == "p"
    owners = {owner for held in bench.services.held.values() for owner in held}
    assert owners == {decision.targets[0].owner, 3}


def test_ipv6_addresses_are_bracketed() -> None:
    bench = Bench(handler(deciders={"prefill": "p"}), ("decode", "prefill"), prefill=Fixed(True))
    candidates = servers("decode", "prefill")
    candidates.endpoints[1].address = "[fd00::2]:8000"
    assert bench.decide(candidates).headers[PREFILLER] == "[fd00::2]:8000"
