"""The parts of the routing benchmark in real time that need no processes."""

import pytest

from epp.config.load import load
from loadtest.sim import main as sim
from loadtest.sim.engine import Engine, Job
from loadtest.sim.slots import SlotServer
from tests.bench.routing_live import MODELS, ORDERED, Figures, Result, agreement, engine_flags, figures, simulator_command, text_of


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
    command = simulator_command("/opt/sim", 8001, 24_000)
    assert command[0] == "/opt/sim"
    assert {"--port=8001", "--max-num-seqs=8", "--kv-cache-size=24000"} < set(command)
    assert {"--prefill-time-per-token=100us", "--inter-token-latency=10ms"} < set(command)


def test_the_servers_of_epp_sim_have_the_size_and_the_pace_of_the_model() -> None:
    virtual = {kind.name: kind.make(1, 24_000, lambda *_: None)[0].first_token_in([Job([], 1_000, 2)], 0.0) for kind in MODELS}
    for kind in MODELS:
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
