"""The parts of the routing benchmark in real time that need no processes."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epp.config.load import DEFAULT_TEXT, load
from loadtest.sim import main as sim
from loadtest.sim.engine import Engine, Job
from loadtest.sim.slots import SlotServer
from tests.bench import routing_live
from tests.bench.routing_live import (
    MODELS,
    ORDERED,
    WORKERS,
    Figures,
    Result,
    agreement,
    engine_flags,
    figures,
    live,
    over,
    simulator_command,
    text_of,
    virtually,
)
from tests.bench.routing_policies import Picked
from tests.bench.routing_servers import slower
from tests.bench.routing_traffic import Session, Workload, single
from tests.bench.routing_zoo import ORACLE


def test_a_token_becomes_a_word_and_equal_prefixes_stay_equal() -> None:
    one, other = text_of(bytes(range(40)) + b"one!"), text_of(bytes(range(40)) + b"two!")
    assert len(one.split()) == 11
    assert len(one) == 44
    assert one[:40] == other[:40]
    assert one[40:] != other[40:]


def test_figures_leave_out_the_warm_up_and_count_failures() -> None:
    results = [Result(0.5, 9.0), Result(1.0, 0.2), Result(2.0, 0.4), Result(3.0, None)]
    row = figures(results, 1.0, 0.1, 0.2)
    assert row == Figures(mean=row.ttft_s / 0.1, p95=2.0, ttft_s=(0.2 + 0.4) / 2, errors=1, requests=3)
    assert figures(results[3:], 1.0, 0.1, 0.2).errors == 1


def test_a_named_simulator_has_the_size_of_the_model() -> None:
    command = simulator_command("/opt/sim", 8001, 24_000, 1.0)
    assert command[0] == "/opt/sim"
    assert {"--port=8001", "--max-num-seqs=8", "--kv-cache-size=24000"} < set(command)
    assert {"--prefill-time-per-token=100us", "--inter-token-latency=10ms"} < set(command)
    assert {"--prefill-time-per-token=300us", "--inter-token-latency=30ms"} < set(simulator_command("/opt/sim", 8001, 24_000, 3.0))


@pytest.mark.parametrize("pace", [1.0, 3.0])
def test_the_servers_of_epp_sim_have_the_size_and_the_pace_of_the_model(pace: float) -> None:
    kinds = [slower(kind, pace) for kind in MODELS]
    virtual = {kind.name: kind.make(1, 24_000, lambda *_: None)[0].first_token_in([Job([], 1_000, 2)], 0.0) for kind in kinds}
    for kind in kinds:
        options = sim.settings(sim.parser().parse_args(engine_flags(kind, 24_000)))
        server = (SlotServer if options.slots else Engine)(options.engine)
        assert server.first_token_in([Job([], 1_000, 2)], 0.0) == pytest.approx(virtual[kind.name])
        assert options.engine.kv_blocks == 24_000
        assert not kind.slots or options.engine.max_running == kind.slots


def test_policies_that_run_in_real_and_in_virtual_time_agree_if_their_order_is_the_same() -> None:
    rows = [Figures(mean, 1.0, 1.0, 0, 9, virtual) for mean, virtual in ((1.2, 1.0), (1.3, 1.1), (9.0, 1.2))]
    assert agreement(rows) == pytest.approx(1.0)
    assert agreement([*rows, Figures(0.5, 1.0, 1.0, 0, 9)]) == pytest.approx(1.0)  # this one has no figure in virtual time
    assert agreement([rows[0]]) == 1.0
    assert agreement([row._replace(virtual=-row.mean) for row in rows]) == pytest.approx(-1.0)


def test_the_configurations_whose_order_is_compared_are_valid() -> None:
    assert len([load(text, name).pipeline for name, text in ORDERED.items()]) >= 6


def test_the_figures_of_several_runs_are_geometric_means_and_sums() -> None:
    row = over([Figures(2.0, 1.0, 0.2, 1, 10, 4.0), Figures(8.0, 4.0, 0.4, 0, 20, 9.0)])
    assert row == Figures(pytest.approx(4.0), pytest.approx(2.0), pytest.approx(0.3), 1, 30, pytest.approx(6.0))
    assert over([row._replace(virtual=0.0)]).virtual == 0.0  # another picker does not run in virtual time


def test_one_lucky_run_does_not_decide_the_order() -> None:
    """Where the popular documents begin is chance, so single runs of a policy that counts no load differ by a factor of ten."""
    others = [Figures(mean, 1.0, 1.0, 0, 9, mean) for mean in (1.0, 2.0, 3.0, 4.0)]
    lucky, usual = Figures(2.7, 1.0, 1.0, 0, 9, 42.0), Figures(30.0, 1.0, 1.0, 0, 9, 12.0)
    assert agreement([*others, lucky]) < 0.9
    assert agreement([*others, over([lucky, usual, usual])]) == pytest.approx(1.0)


def test_configurations_have_as_many_workers_in_virtual_time_as_in_real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet: Any = SimpleNamespace(kv_blocks=100, servers=range(8))
    monkeypatch.setattr(routing_live, "measure", lambda kind, workload, policies, seed, seconds: policies)
    made: Any = virtually(MODELS[0], Workload("none", lambda *_: []), {"default": DEFAULT_TEXT}, 1, 1.0)
    policy = made["default"](fleet, 1)
    assert isinstance(policy, Picked)
    assert len({id(policy.pipeline(SimpleNamespace(worker=worker))) for worker in range(8)}) == WORKERS  # type: ignore[arg-type]


def test_each_seed_plays_other_requests_and_all_seeds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[tuple[bytes, float, float]] = []

    async def play(port: int, sessions: list[Session], answer_s: float) -> list[Result]:
        played.append((sessions[0].turns[0].prompt, sessions[0].at, answer_s))
        return [Result(9.0, 0.1 * 4 ** len(played))]

    @contextmanager
    def servers(*_: object) -> Iterator[Path]:
        yield Path()

    cluster = SimpleNamespace(envoy=lambda picker: 1)
    outcome = SimpleNamespace(ttft_mean=0.1, ttft_p95=0.1)
    monkeypatch.setattr(routing_live, "play", play)
    monkeypatch.setattr(routing_live, "servers", servers)
    monkeypatch.setattr(routing_live, "Cluster", lambda: nullcontext(cluster))
    monkeypatch.setattr(routing_live, "_picker", lambda *_: None)
    monkeypatch.setattr(routing_live, "virtually", lambda *_: {ORACLE: outcome, "one": outcome})
    workload = Workload("drawn", lambda rng, seconds, rate: [single(1.0, rng.randbytes(8), 1)])
    told: list[str] = []
    table = live(slower(MODELS[0], 3.0), [workload], {"one": ""}, seconds=8.0, seeds=(1, 2), told=told.append)["drawn"]
    assert len({prompt for prompt, _, _ in played}) == 2
    assert [(at, answer_s) for _, at, answer_s in played] == [(3.0, 360.0)] * 2
    assert (table["one"].mean, table["one"].requests) == (pytest.approx(8.0), 2)
    assert any("8.00 (4.00 to 16.00)" in line for line in told)
