"""Servers by role, and requests that run through the stages of disaggregated serving."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from epp.candidates import Candidates, EndpointList, Scores, Snapshot
from epp.decision.decide import choose
from epp.decision.decision import Decision, ProfileRun
from epp.decision.pipeline import Pipeline, WiredProfile, Wiring, compile_pipeline
from epp.plugin import Decider, NoParams, Plugin, Profile, ProfileHandler, Scorer
from epp.plugins.filters.roles import DecodeFilter, EncodeFilter, PrefillFilter
from epp.plugins.pickers.max_score import MaxScore
from epp.plugins.profiles._stages import PEER
from epp.plugins.profiles.disagg import Disaggregated
from epp.plugins.profiles.pd import PrefillDecode
from epp.request import Request
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
    endpoint_list = EndpointList(endpoints(size, [{ROLE: role} for role in roles]))
    made = Snapshot(endpoint_list, {}, fresh=yes, known=yes, down=no, inflight_at_scrape=np.zeros(size))
    return Candidates(made, np.zeros(size), np.zeros(size))


class Fixed(Decider):
    """A decider with a fixed answer. It records the decode target of each call."""

    def __init__(self, answer: bool) -> None:
        super().__init__("fixed", NoParams())
        self.answer = answer
        self.calls: list[str | None] = []

    def wanted(self, request: Request, run: ProfileRun | None) -> bool:
        self.calls.append(None if run is None else run.targets[0].name)
        return self.answer


class SeesPeer(Scorer):
    """Records which peer it saw in which profile."""

    consumes = (PEER,)

    def __init__(self) -> None:
        super().__init__("sees", NoParams())
        self.seen: list[tuple[str, str | None]] = []

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        peer = request[PEER]
        self.seen.append((profile.name, None if peer is None else peer.name))
        return None


class Bench:
    """A pipeline around a handler, with its services."""

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
            Wiring(plugins=plugins, parsers=(), handler=handler, profiles=tuple(wired), producers=())
        )
        self.pipeline.start(self.services)  # type: ignore[arg-type]

    def decide(self, candidates: Candidates, r: Request | None = None) -> Decision:
        coroutine = choose(self.pipeline, r or request(), FakePool(candidates))
        try:
            coroutine.send(None)
        except StopIteration as done:
            decision: Decision = done.value
            return decision
        raise AssertionError("a decision waits for nothing in these tests")

    def counted(self, name: str) -> dict[tuple[str, ...], int]:
        return dict(self.services.counted[name].values)


def handler(**params: Any) -> Disaggregated:
    return Disaggregated("disagg", msgspec.convert(params, Disaggregated.Params))


DECIDED = "disagg_decision_total"
UNSERVED = "disagg_stage_unserved_total"
ALL_ROLES = ("decode", "prefill", "encode", "encode")


def pd(**params: Any) -> PrefillDecode:
    return PrefillDecode("pd", msgspec.convert(params, PrefillDecode.Params))
