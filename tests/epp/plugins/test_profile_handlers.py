"""Profiles chosen by a header, and data-parallel ranks behind one port."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest

from epp.decision.decision import ProfileRun
from epp.errors import Cause, Refused
from epp.plugin import Profile
from epp.plugins import pickers
from epp.plugins.pickers.max_score import MaxScore
from epp.plugins.profiles.by_header import HeaderProfile
from epp.plugins.profiles.data_parallel import DataParallel
from epp.request.client_headers import RANK_HEADER
from tests.fakes import candidates, request


def profiles(*names: str) -> dict[str, Profile]:
    return {name: Profile(name, (), (), MaxScore("p", pickers.Parameters())) for name in names}


def made(cls: type, **params: object):
    return cls(cls.type_name, msgspec.convert(params, cls.Params))


def picked(handler: HeaderProfile, names: Sequence[str], headers: Mapping[str, str]) -> list[str]:
    return [profile.name for profile in handler.pick(request(headers=headers), profiles(*names), {})]


def run(*picked: int) -> ProfileRun:
    c = candidates(count=3)
    return ProfileRun(c, np.zeros(3), picked)


# header-profile-handler


@pytest.mark.parametrize(
    ("params", "headers", "expected"),
    [
        ({}, {"epp-profile": "prefill"}, ["prefill"]),
        ({}, {"epp-profile": " prefill "}, ["prefill"]),
        ({}, {}, ["decode"]),
        ({}, {"epp-profile": ""}, ["decode"]),
        ({}, {"epp-profile": "Prefill"}, []),
        ({"defaultProfile": "prefill"}, {}, ["prefill"]),
        ({"headerName": " X-Way ", "defaultProfile": " "}, {"x-way": "prefill"}, ["prefill"]),
    ],
)
def test_the_header_names_the_profile(params: dict[str, str], headers: dict[str, str], expected: list[str]) -> None:
    assert picked(made(HeaderProfile, **params), ("prefill", "decode"), headers) == expected


def test_a_single_profile_runs_whatever_the_header_says() -> None:
    assert picked(made(HeaderProfile), ("only",), {"epp-profile": "other"}) == ["only"]


def test_the_chosen_profile_runs_once_and_its_targets_are_the_result() -> None:
    handler, runs = made(HeaderProfile), {"prefill": run(2, 0)}
    assert handler.pick(request(), profiles("prefill", "decode"), runs) == ()
    decision = handler.result(request(), runs)
    assert decision.primary == "prefill" and [t.name for t in decision.targets] == ["pod-2", "pod-0"]


@pytest.mark.parametrize(("runs", "cause"), [({}, Cause.UNKNOWN_PROFILE), ({"decode": None}, Cause.NO_ENDPOINT_LEFT)])
def test_an_unknown_profile_is_the_clients_mistake_and_a_missing_endpoint_is_not(runs: dict[str, None], cause: Cause) -> None:
    with pytest.raises(Refused) as refused:
        made(HeaderProfile).result(request(), runs)
    assert refused.value.cause is cause


def test_the_client_learns_which_header_has_which_unknown_name() -> None:
    r = request()
    r.headers = {"epp-profile": "fast"}
    with pytest.raises(Refused, match="header epp-profile names 'fast', which is no scheduling profile"):
        made(HeaderProfile).result(r, {})


def test_an_unknown_default_profile_stops_the_start_if_it_is_configured() -> None:
    assert made(HeaderProfile).check(["a", "b"]) is None  # every request may bring the header
    assert made(HeaderProfile, defaultProfile="a").check(["a", "b"]) is None
    assert made(HeaderProfile, defaultProfile="c").check(["a"]) is None
    problem = made(HeaderProfile, defaultProfile="c").check(["a", "b"])
    assert problem == "defaultProfile of plugin 'header-profile-handler' is 'c', but the profiles are: a, b"


# data-parallel-profile-handler


def test_the_gateway_sends_to_the_primary_port_and_the_header_names_the_rank() -> None:
    decision = made(DataParallel, primaryPort=9000).result(request(), {"default": run(2, 0)})
    assert [t.address for t in decision.targets] == ["10.0.0.3:9000", "10.0.0.1:9000"]
    assert decision.headers == {RANK_HEADER: "10.0.0.3:8000"}
    assert decision.primary == "default"


def test_a_rewritten_target_is_counted_at_the_rank_that_was_picked() -> None:
    runs = {"default": run(1)}
    decision = made(DataParallel, primaryPort=9000).result(request(), runs)
    (target,), rank = decision.targets, runs["default"].targets[0]
    for name in ("name", "namespace", "host", "labels", "slot", "generation", "owner"):
        assert getattr(target, name) == getattr(rank, name)
    assert rank.port == 8000


def test_port_0_keeps_the_port_of_the_rank() -> None:
    decision = made(DataParallel, primaryPort=0).result(request(), {"default": run(1)})
    assert decision.targets[0].address == decision.headers[RANK_HEADER] == "10.0.0.2:8000"


def test_it_runs_one_profile_once() -> None:
    handler, all_profiles = made(DataParallel), profiles("default")
    assert handler.pick(request(), all_profiles, {}) == tuple(all_profiles.values())
    assert handler.pick(request(), all_profiles, {"default": run(0)}) == ()
    assert handler.check(["default"]) is None
    assert handler.check(["a", "b"]) == "data-parallel-profile-handler runs one profile, but 2 are configured: a, b"
    with pytest.raises(Refused) as refused:
        handler.result(request(), {"default": None})
    assert refused.value.cause is Cause.NO_ENDPOINT_LEFT


@pytest.mark.parametrize("port", [-1, 65536])
def test_ports_are_in_range(port: int) -> None:
    with pytest.raises(msgspec.ValidationError):
        made(DataParallel, primaryPort=port)
