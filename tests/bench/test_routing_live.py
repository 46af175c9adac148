"""The parts of the routing benchmark in real time that need no processes."""

from tests.bench.routing_live import Figures, Result, figures, simulator_command, text_of


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
    command = simulator_command("/opt/sim", 8001)
    assert command[0] == "/opt/sim"
    assert {"--port=8001", "--max-num-seqs=8", "--prefill-time-per-token=100us", "--inter-token-latency=10ms"} < set(command)
