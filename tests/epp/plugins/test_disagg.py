"""Disaggregated serving: which stages run, who serves them, what the model server and the metrics are told."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from epp.candidates import Candidates, Roster, Scores, Snapshot
from epp.config import load
from epp.decide import decide
from epp.decision import Decision, ProfileRun
from epp.errors import Cause, Refused
from epp.findings import ConfigErrors
from epp.pipeline import Pipeline, Recipe, WiredProfile, compile_pipeline
from epp.plugin import Decider, NoParams, Plugin, PreRequest, Profile, ProfileHandler, Scorer
from epp.plugins.deciders.always import Always
from epp.plugins.deciders.multimodal import Multimodal
from epp.plugins.deciders.prefix_based import PrefixBased
from epp.plugins.filters.roles import DecodeFilter, EncodeFilter, PrefillFilter
from epp.plugins.pickers.max_score import MaxScore
from epp.plugins.producers.approx_prefix import ApproximatePrefix
from epp.plugins.profiles._stages import PEER
from epp.plugins.profiles.disagg import Disaggregated
from epp.plugins.profiles.disagg_headers import DisaggregationHeaders
from epp.plugins.profiles.pd import PrefillDecode
from epp.prefix.match import APPROXIMATE, PrefixMatch, prefix_match
from epp.request import Request
from epp.tokens import TOKENS, Feature, PromptTokens, TokenizedPrompt
from tests.fakes import FakePool, FakeServices, endpoints, request

ROLE = "llm-d.ai/role"
PREFILLER, ENCODERS = "x-prefiller-host-port", "x-encoder-hosts-ports"
STEERING = (PREFILLER, ENCODERS, "x-data-parallel-host-port", "x-kv-cache-source-host-port")
FILTERS = {"decode": DecodeFilter, "prefill": PrefillFilter, "encode": EncodeFilter}
NOTHING_COUNTED: dict[tuple[str, ...], int] = {}


def servers(*roles: str) -> Candidates:
    """One endpoint per role, in order: 10.0.0.1, 10.0.0.2, ..."""
    size = len(roles)
    yes, no = np.ones(size, dtype=bool), np.zeros(size, dtype=bool)
    roster = Roster(endpoints(size, [{ROLE: role} for role in roles]))
    made = Snapshot(roster, {}, fresh=yes, known=yes, down=no, inflight_at_scrape=np.zeros(size))
    return Candidates(made, np.zeros(size), np.zeros(size))


class Says(Decider):
    """A decider that says what it is told to, and remembers of whom it was asked."""

    def __init__(self, answer: bool) -> None:
        super().__init__("says", NoParams())
        self.answer = answer
        self.asked: list[str | None] = []

    def wanted(self, request: Request, run: ProfileRun | None) -> bool:
        self.asked.append(None if run is None else run.targets[0].name)
        return self.answer


class SeesPeer(Scorer):
    """Remembers whom it saw as peer in which profile."""

    consumes = (PEER,)

    def __init__(self) -> None:
        super().__init__("sees", NoParams())
        self.seen: list[tuple[str, str | None]] = []

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        peer = request[PEER]
        self.seen.append((profile.name, None if peer is None else peer.name))
        return None


class Bench:
    """A pipeline around a handler, its services, and one decision after the other."""

    def __init__(
        self,
        handler: ProfileHandler,
        profiles: Sequence[str] = ("decode", "prefill", "encode"),
        *others: Plugin,
        filters: Sequence[type[Plugin]] = (),
        **deciders: Decider,
    ) -> None:
        self.services = FakeServices()
        self.scorer = SeesPeer()
        picker = MaxScore("pick", MaxScore.Params(max_num_of_endpoints=2))
        kinds = filters or [FILTERS[name] for name in profiles]
        wired = [
            WiredProfile(name, ((kind(name, NoParams()), 1.0), (self.scorer, 1.0), (picker, 1.0)))
            for name, kind in zip(profiles, kinds, strict=True)
        ]
        handler.resolve(deciders)
        plugins = (handler, picker, self.scorer, *others)
        self.pipeline: Pipeline = compile_pipeline(
            Recipe(plugins=plugins, parsers=(), handler=handler, profiles=tuple(wired), producers=())
        )
        self.pipeline.start(self.services)  # type: ignore[arg-type]

    def decide(self, candidates: Candidates, asked: Request | None = None) -> Decision:
        coroutine = decide(self.pipeline, asked or request(), FakePool(candidates))
        try:
            coroutine.send(None)
        except StopIteration as done:
            decision: Decision = done.value
            return decision
        raise AssertionError("a decision waits for nothing here")

    def counted(self, name: str) -> dict[tuple[str, ...], int]:
        return dict(self.services.counted[name].values)


def handler(**params: Any) -> Disaggregated:
    return Disaggregated("disagg", msgspec.convert(params, Disaggregated.Params))


DECIDED = "disagg_decision_total"
UNSERVED = "disagg_stage_unserved_total"
ALL_ROLES = ("decode", "prefill", "encode", "encode")


@pytest.mark.parametrize(
    ("encode", "prefill", "kind"),
    [
        (False, False, "decode-only"),
        (False, True, "prefill-decode"),
        (True, False, "encode-decode"),
        (True, True, "encode-prefill-decode"),
    ],
)
def test_the_deciders_choose_the_stages_and_the_decision_is_counted_once(
    encode: bool, prefill: bool, kind: str
) -> None:
    deciders = {"encode": Says(encode), "prefill": Says(prefill)}
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
    assert [decider.asked for decider in deciders.values()] == [["pod-0"], ["pod-0"]]


def test_an_unnamed_model_is_counted_as_unknown() -> None:
    bench = Bench(handler(), ("decode",))
    bench.decide(servers("decode"), request(target_model=""))
    assert bench.counted(DECIDED) == {("unknown", "decode-only"): 1}


def test_without_deciders_only_decode_runs() -> None:
    decision = Bench(handler()).decide(servers(*ALL_ROLES))
    assert list(decision.runs) == ["decode"]


def test_a_stage_without_a_profile_is_left_out() -> None:
    bench = Bench(handler(deciders={"encode": "e", "prefill": "p"}), ("decode",), encode=Says(True), prefill=Says(True))
    assert list(bench.decide(servers("decode")).runs) == ["decode"]


def test_no_decode_endpoint_is_refused_and_the_deciders_are_not_asked() -> None:
    decider = Says(True)
    bench = Bench(handler(deciders={"prefill": "p"}), ("decode", "prefill"), prefill=decider)
    with pytest.raises(Refused) as refused:
        bench.decide(servers("prefill"))
    assert refused.value.cause is Cause.NO_ENDPOINT_LEFT
    assert decider.asked == []
    assert bench.counted(DECIDED) == NOTHING_COUNTED


@pytest.mark.parametrize("order", ["prefill-first", "Prefill_First", "PREFILLFIRST", "prefill"])
def test_prefill_first_always_prefills_and_decode_sees_the_prefill_target(order: str) -> None:
    decider = Says(True)
    bench = Bench(handler(stageOrder=order, deciders={"encode": "e"}), encode=decider)
    decision = bench.decide(servers(*ALL_ROLES))
    assert list(decision.runs) == ["prefill", "encode", "decode"]
    assert bench.scorer.seen == [("prefill", None), ("encode", None), ("decode", "pod-1")]
    assert decider.asked == [None]
    assert decision.headers[PREFILLER] == "10.0.0.2:8000"
    assert bench.counted(DECIDED) == {("m", "encode-prefill-decode"): 1}


def test_prefill_first_without_a_prefill_profile_is_decode_alone() -> None:
    decision = Bench(handler(stageOrder="prefill-first"), ("decode",)).decide(servers("decode"))
    assert (list(decision.runs), decision.headers) == (["decode"], {})


@pytest.mark.parametrize("order", ["", "decode", "decode-first", "DECODE_FIRST"])
def test_one_scorer_in_both_profiles_sees_no_peer_in_the_first_and_the_first_s_target_in_the_second(order: str) -> None:
    bench = Bench(
        handler(stageOrder=order, deciders={"prefill": "p"}), ("decode", "prefill"), prefill=Always("p", NoParams())
    )
    bench.decide(servers("prefill", "decode"))
    assert bench.scorer.seen == [("decode", None), ("prefill", "pod-1")]


@pytest.mark.parametrize("order", ["decode-first", "prefill-first"])
def test_without_a_prefill_endpoint_the_decode_server_prefills_and_that_is_counted_and_said(order: str) -> None:
    params = {} if order == "prefill-first" else {"deciders": {"prefill": "p"}}
    bench = Bench(handler(stageOrder=order, **params), ("decode", "prefill"), prefill=Says(True))
    decision = bench.decide(servers("decode"))
    assert [target.name for target in decision.targets] == ["pod-0"]
    assert PREFILLER not in decision.headers and PREFILLER in decision.removed_headers
    assert bench.counted(DECIDED) == {("m", "decode-only"): 1}
    assert bench.counted(UNSERVED) == {("prefill", "skipped"): 1}
    assert "decode servers compute prompts themselves" in bench.services.warned[0]


@pytest.mark.parametrize("order", ["decode-first", "prefill-first"])
def test_the_policy_can_refuse_a_request_that_finds_no_prefill_endpoint(order: str) -> None:
    params = {} if order == "prefill-first" else {"deciders": {"prefill": "p"}}
    bench = Bench(handler(stageOrder=order, onNoPrefill="refuse", **params), ("decode", "prefill"), prefill=Says(True))
    with pytest.raises(Refused) as refused:
        bench.decide(servers("decode"))
    assert refused.value.cause is Cause.NO_ENDPOINT_LEFT
    assert bench.counted(DECIDED) == NOTHING_COUNTED
    assert bench.counted(UNSERVED) == {("prefill", "refused"): 1}
    assert "requests are refused" in bench.services.warned[0]


def test_a_request_that_needs_no_prefill_is_not_refused_for_lack_of_prefill_endpoints() -> None:
    bench = Bench(handler(onNoPrefill="refuse", deciders={"prefill": "p"}), ("decode", "prefill"), prefill=Says(False))
    assert bench.decide(servers("decode")).primary == "decode"


def test_without_an_encode_endpoint_the_request_goes_on_and_that_is_counted_and_said() -> None:
    bench = Bench(handler(deciders={"encode": "e"}), ("decode", "encode"), encode=Says(True))
    decision = bench.decide(servers("decode"))
    assert decision.removed_headers == STEERING
    assert bench.counted(UNSERVED) == {("encode", "skipped"): 1}


def test_profiles_may_have_other_names_and_prefixes_are_learned_where_they_are_prefilled() -> None:
    producer = ApproximatePrefix(APPROXIMATE, ApproximatePrefix.Params())
    bench = Bench(
        handler(profiles={"decode": "d", "prefill": "p"}, deciders={"prefill": "x"}),
        ("d", "p"),
        producer,
        filters=(DecodeFilter, PrefillFilter),
        prefill=Says(True),
    )
    asked = request(b"x" * 1000)
    candidates = servers("decode", "decode", "prefill")
    producer.produce(asked, candidates)
    decision = bench.decide(candidates, asked)
    assert decision.prefill == "p"
    owners = {owner for held in bench.services.held.values() for owner in held}
    assert owners == {decision.targets[0].owner, 3}


def test_ipv6_addresses_are_bracketed() -> None:
    bench = Bench(handler(deciders={"prefill": "p"}), ("decode", "prefill"), prefill=Says(True))
    candidates = servers("decode", "prefill")
    candidates.endpoints[1].address = "[fd00::2]:8000"
    assert bench.decide(candidates).headers[PREFILLER] == "[fd00::2]:8000"


# Parameters

FLAT = {
    "decodeProfile": "d", "prefillProfile": "p", "encodeProfile": "e",
    "prefillDeciderPluginName": "x", "encodeDeciderPluginName": "y",
}  # fmt: skip


def test_the_flat_parameters_mean_the_same_as_the_nested_ones_and_are_said_to_be_deprecated() -> None:
    flat = handler(**FLAT, deciderPluginName="ignored")
    nested = handler(profiles={"decode": "d", "prefill": "p", "encode": "e"}, deciders={"prefill": "x", "encode": "y"})
    for made in (flat, nested):
        assert (made.decode, made.prefill, made.encode) == ("d", "p", "e")
        assert {stage: need.name for stage, need in made.needs.items()} == {"prefill": "x", "encode": "y"}
    assert nested.deprecated == []
    assert sorted(flat.deprecated) == [
        "decodeProfile: is deprecated; write profiles.decode",
        "encodeDeciderPluginName: is deprecated; write deciders.encode",
        "encodeProfile: is deprecated; write profiles.encode",
        "prefillDeciderPluginName: is deprecated; write deciders.prefill",
        "prefillProfile: is deprecated; write profiles.prefill",
    ]
    assert handler(deciderPluginName="z").needs["prefill"].name == "z"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"profiles": {}, "decodeProfile": "d"}, "decodeProfile: the deprecated flat parameters and the nested"),
        ({"deciders": {"prefill": "p"}, "encodeProfile": "e"}, "encodeProfile: the deprecated flat"),
        ({"stageOrder": "sideways"}, "stageOrder: 'sideways' is neither decode-first nor prefill-first"),
        ({"stageOrder": "prefill", "deciders": {"prefill": "p"}}, "deciders.prefill: with stageOrder prefill-first"),
        ({"stageOrder": "prefill", "deciderPluginName": "p"}, "deciderPluginName: with stageOrder prefill-first"),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        handler(**params)


def test_stages_that_cannot_run_are_named_at_start() -> None:
    assert handler().check(["prefill"]) is not None
    assert handler(profiles={"prefill": "decode"}).check(["decode"]) is not None
    made = handler(deciders={"prefill": "p"})
    assert made.check(["decode", "encode", "other"]) is None
    assert made.idle(["decode", "encode", "other"]) == [
        "disagg has no prefill stage: there is no profile 'prefill' (profiles.prefill)"
    ]
    assert made.reaches(["decode", "encode", "other"]) == ["decode"]
    prefills = handler(stageOrder="prefill-first")
    for one in (made, prefills):
        assert one.idle(["decode", "prefill"]) == []
        assert one.reaches(["encode", "decode", "prefill"]) == ["decode", "prefill"]
    assert len(prefills.idle(["decode"])) == 1


# The deprecated handlers


def pd(**params: Any) -> PrefillDecode:
    return PrefillDecode("pd", msgspec.convert(params, PrefillDecode.Params))


@pytest.mark.parametrize(("wanted", "kind"), [(True, "prefill-decode"), (False, "decode-only")])
def test_the_old_handler_decides_and_a_header_handler_tells_the_sidecar(wanted: bool, kind: str) -> None:
    headers = DisaggregationHeaders("h", DisaggregationHeaders.Params())
    bench = Bench(pd(), ("decode", "prefill"), headers, prefill=Says(wanted))
    decision = bench.decide(servers("prefill", "decode"))
    assert decision.targets[0].name == "pod-1"
    assert decision.headers == ({PREFILLER: "10.0.0.1:8000"} if wanted else {})
    assert bench.counted("pd_decision_total") == {("m", kind): 1}


def test_the_old_handler_alone_sets_no_headers() -> None:
    assert not isinstance(pd(), PreRequest)


def test_a_primary_port_replaces_the_decode_target_s_own_which_a_header_names() -> None:
    decision = Bench(pd(primaryPort=9000), ("decode", "prefill"), prefill=Says(True)).decide(
        servers("decode", "prefill")
    )
    assert decision.targets[0].address == "10.0.0.1:9000"
    assert decision.targets[0].slot == 0
    assert decision.headers == {"x-data-parallel-host-port": "10.0.0.1:8000"}
    assert decision.runs["prefill"].targets[0].address == "10.0.0.2:8000"  # type: ignore[union-attr]


def test_the_old_handler_needs_both_profiles_and_a_decider() -> None:
    assert pd().check(["decode", "prefill"]) is None
    assert "there is no 'prefill'" in (pd().check(["decode"]) or "")
    assert "both are the same" in (pd(prefillProfile="decode").check(["decode"]) or "")
    assert pd().needs["prefill"].name == "prefix-based-pd-decider"
    with pytest.raises(ValueError, match="deciderPluginName: is empty"):
        pd(deciderPluginName="")
    assert len(pd(prefixPluginName="a", prefixPluginType="b").without_effect) == 2
    assert pd().reaches(["decode", "prefill", "x"]) == ["decode", "prefill"]


# Deciders


def prefix_based(**params: Any) -> PrefixBased:
    return PrefixBased("d", msgspec.convert(params, PrefixBased.Params))


def matched(tokens: int, blocks: Sequence[float] | None, producer: str = APPROXIMATE) -> Request:
    made = request(b"x" * (4 * tokens))
    held = None if blocks is None else np.array(blocks)
    made[prefix_match(producer)] = PrefixMatch(held, np.zeros(tokens // 64, np.uint64), 64)
    return made


def decode_run(candidates: Candidates, picked: int) -> ProfileRun:
    return ProfileRun(candidates, candidates.zeros(), [picked])


# 64 tokens a block: 1,000 tokens with 10 blocks cached leave 1000 - 640 = 360 to compute.
@pytest.mark.parametrize(
    ("params", "tokens", "cached_blocks", "wanted"),
    [
        ({}, 1000, 0, False),
        ({"nonCachedTokens": 360}, 1000, 10, True),
        ({"nonCachedTokens": 361}, 1000, 10, False),
        ({"nonCachedTokens": 1000}, 1000, 0, True),
        ({"nonCachedTokens": 1001}, 1000, 0, False),
        ({"nonCachedTokens": 100, "promptTokens": 1000}, 1000, 0, True),
        ({"nonCachedTokens": 100, "promptTokens": 1001}, 1000, 0, False),
    ],
)
def test_prefill_pays_when_enough_of_a_long_prompt_is_not_cached(
    params: dict[str, int], tokens: int, cached_blocks: int, wanted: bool
) -> None:
    decider = prefix_based(**params)
    assert decider.wanted(matched(tokens, [99, cached_blocks]), decode_run(servers("decode", "decode"), 1)) is wanted


def test_what_counts_is_cached_at_the_decode_target_whatever_was_filtered_out() -> None:
    candidates = servers("prefill", "decode", "decode").keep(np.array([False, True, True]))
    decider = prefix_based(nonCachedTokens=64)
    asked = matched(1024, [0, 0, 16])
    assert decider.wanted(asked, decode_run(candidates, 0))
    assert not decider.wanted(asked, decode_run(candidates, 1))


def test_nothing_is_cached_as_long_as_nobody_says_so() -> None:
    run = decode_run(servers("decode"), 0)
    assert prefix_based(nonCachedTokens=64).wanted(request(b"x" * 256), run)
    assert prefix_based(nonCachedTokens=64).wanted(matched(64, None), run)
    assert not prefix_based(nonCachedTokens=64).wanted(request(b"x" * 252), run)


def test_the_token_producer_s_count_comes_before_the_estimate_by_bytes() -> None:
    asked = request(b"x" * 400)
    run = decode_run(servers("decode"), 0)
    decider = prefix_based(nonCachedTokens=100)
    assert decider.wanted(asked, run)
    asked[TOKENS] = TokenizedPrompt([PromptTokens(np.zeros(99, np.uint32))])
    assert not decider.wanted(asked, run)
    asked[TOKENS] = TokenizedPrompt([PromptTokens(None, [IMAGE])])  # nobody counted
    assert decider.wanted(asked, run)
    assert decider.optional == (TOKENS,)


IMAGE = Feature("image", "cafe", 0, 1)


@pytest.mark.parametrize(
    ("prompts", "wanted"),
    [
        (None, False),
        ([], False),
        ([PromptTokens(None)], False),
        ([PromptTokens(None), PromptTokens(None, [IMAGE])], True),
    ],
)
def test_requests_with_media_are_encoded_elsewhere(prompts: Any, wanted: bool) -> None:
    asked = request()
    if prompts is not None:
        asked[TOKENS] = TokenizedPrompt(prompts)
    assert Multimodal("m", NoParams()).wanted(asked, None) is wanted


class OtherProducer(ApproximatePrefix):
    pass


def test_the_decider_reads_the_one_producer_that_is_listed_unless_told_whose() -> None:
    other = OtherProducer("precise", ApproximatePrefix.Params())
    usual = ApproximatePrefix(APPROXIMATE, ApproximatePrefix.Params())

    def reads(given: Sequence[Plugin], **params: Any) -> list[str]:
        decider = prefix_based(nonCachedTokens=1, **params)
        decider.meet(given)
        return [key.name for key in decider.consumes]

    assert reads([]) == [f"prefix_match/{APPROXIMATE}"]
    assert reads([other]) == ["prefix_match/precise"]
    assert reads([other, usual]) == [f"prefix_match/{APPROXIMATE}"]
    assert reads([other, usual], prefixMatchInfoProducerName="precise") == ["prefix_match/precise"]


def test_a_decider_that_always_says_no_needs_no_producer_and_says_so_at_start() -> None:
    assert prefix_based().consumes == ()
    assert prefix_based().without_effect == ["nonCachedTokens: is 0, so that no request is ever disaggregated"]


# Configurations

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefill-filter
- type: decode-filter
- type: queue-scorer
- type: prefix-based-pd-decider
  parameters: {nonCachedTokens: %d}
- type: disagg-profile-handler
  parameters: %s
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: queue-scorer}]}
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: queue-scorer}]}
"""


def test_the_prefix_producer_comes_by_itself_where_a_decider_reads_it_and_nowhere_else() -> None:
    used = "{deciders: {prefill: prefix-based-pd-decider}}"
    assert APPROXIMATE in load(CONFIG % (16, used), "test").pipeline.plugins
    assert APPROXIMATE not in load(CONFIG % (0, used), "test").pipeline.plugins
    unused = load(CONFIG % (16, "{}"), "test")
    assert APPROXIMATE not in unused.pipeline.plugins
    assert any(warning.rule == "unreachable-profile" for warning in unused.warnings)


def test_deprecated_parameters_are_said_with_their_line() -> None:
    warnings = load(CONFIG % (16, "{deciderPluginName: prefix-based-pd-decider}"), "test").warnings
    (said,) = [w for w in warnings if w.rule == "deprecated-field"]
    assert "write deciders.prefill" in said.message
    assert CONFIG.splitlines()[said.line - 1].startswith("  parameters: %s")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("{deciders: {prefill: nobody}}", "references undefined plugin 'nobody'"),
        ("{deciders: {prefill: queue-scorer}}", "plugin 'queue-scorer' is a scorer, not a decider"),
        ("{profiles: {decode: d}}", "decodes by the profile 'd'"),
        ("{profiles: {decoed: d}}", "unknown field 'decoed'"),
        ("{onNoPrefill: retry}", "onNoPrefill"),
    ],
)
def test_what_is_wrong_in_a_configuration_stops_the_start(parameters: str, message: str) -> None:
    with pytest.raises(ConfigErrors) as errors:
        load(CONFIG % (16, parameters), "test")
    assert message in str(errors.value)
