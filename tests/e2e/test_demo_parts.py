"""Parts of the demo: the script of the users, the comparison, the parsing of pages."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from loadtest.demo import envoy_config, summary, view
from loadtest.demo.stack import Fleet, Replica, Unavailable, store_path
from loadtest.demo.traffic import Key, Result, Run, User, system_prompts
from tests.e2e.conftest import WORKERS, Gateway

SEED = 7


def script(seed: int, turns: int) -> list[tuple[Key, str, int]]:
    turns = zip(range(turns), User(3, seed, system_prompts(seed)).turns(), strict=False)
    return [(turn.key, turn.question, turn.answer_tokens) for _, (turn, _) in turns]


def answer(key: Key, first_s: float, cached: int) -> Result:
    return Result(key, "", first_s, first_s * 2, 100, cached)


def test_the_same_seed_gives_the_same_script() -> None:
    assert script(SEED, 40) == script(SEED, 40)
    assert script(SEED, 40) != script(SEED + 1, 40)


def test_a_conversation_keeps_its_beginning_and_grows() -> None:
    seen: dict[tuple[int, int], list[dict[str, str]]] = {}
    for _, (turn, conversation) in zip(range(40), User(0, SEED, system_prompts(SEED)).turns(), strict=False):
        before = seen.get(turn.key[:2], [])
        assert conversation.messages[: len(before)] == before
        assert len(conversation.messages) > len(before)
        seen[turn.key[:2]] = list(conversation.messages)
    assert len(seen) > 2


def test_runs_are_compared_over_requests_that_both_finished() -> None:
    both, one, failed = (0, 0, 0), (0, 0, 1), (0, 0, 2)
    fast = Run("", "", 1, 0, [answer(both, 0.1, 80), answer(one, 9.0, 0), answer(failed, 0.1, 80)], [], 2.0)
    slow = Run("", "", 1, 0, [answer(both, 0.4, 20), Result(failed, "status 503")], [], 2.0)
    columns = summary.columns({"picker": fast, "round robin": slow})
    assert [each.compared for each in columns.values()] == [1, 1]
    assert [each.errors for each in columns.values()] == [0, 1]
    assert [round(each.first_token_p95_ms) for each in columns.values()] == [100, 400]
    assert [each.cached_share for each in columns.values()] == [0.8, 0.2]
    assert set(summary.as_json(columns)) == {"picker", "round_robin"}


def compared(ours_s: float, theirs_s: float, *, late_s: float = 0.001, requests: int = 100, spread_s: float = 0.0) -> str:
    """The verdict on two runs with these mean times to the first token. `spread_s`: how far the second run's times are from their mean."""
    keys = [(0, 0, turn) for turn in range(requests)]
    ours = Run("", "", 1, 0, [answer(key, ours_s, 80) for key in keys], [late_s] * requests, 2.0)
    results = [answer(key, theirs_s + (spread_s if key[2] % 2 else -spread_s), 20) for key in keys]
    return summary.verdict({"picker": ours, "round robin": Run("", "", 1, 0, results, [0.001] * requests, 2.0)})


def test_the_verdict_is_a_sentence_with_both_means() -> None:
    assert compared(0.103, 0.135) == ("first token after 103 ms on average (picker) instead of 135 ms (round robin): 24% sooner")
    assert compared(0.150, 0.120).endswith("instead of 120 ms (round robin): 25% later")


def test_a_difference_that_may_be_chance_is_called_so() -> None:
    assert compared(0.130, 0.135, spread_s=0.1).endswith(": no more than chance")


def test_there_is_no_comparison_on_a_machine_that_ends_timers_late() -> None:
    assert compared(0.103, 0.135, late_s=0.02).startswith("no comparison: this machine was too busy. ")
    assert compared(0.103, 0.303, late_s=0.02).endswith("66% sooner")


def test_there_is_no_comparison_of_a_few_requests() -> None:
    assert compared(0.1, 0.2, requests=29) == ("no comparison: both finished only 29 requests, 30 are needed; give more --seconds")


def test_one_run_alone_has_no_verdict() -> None:
    assert summary.verdict({"picker": Run("", "", 1, 0, [answer((0, 0, 0), 0.1, 80)])}) == ""


def test_the_predicted_share_stands_beside_the_cached_share() -> None:
    picker = Run("", "", 1, 0, [answer((0, 0, 0), 0.1, 80)], [], 2.0, predicted_share=0.75)
    other = Run("", "", 1, 0, [answer((0, 0, 0), 0.4, 20)], [], 2.0)
    columns = summary.columns({"picker": picker, "round robin": other})
    assert [each.predicted_share for each in columns.values()] == [0.75, None]
    console = Console(file=io.StringIO(), record=True, width=120)
    console.print(summary.table(columns))
    (line,) = (line for line in console.export_text().splitlines() if "predicted by the picker" in line)
    assert line.split("│")[2:4] == ["    75% ", "           – "]


def test_a_run_without_requests_is_left_out() -> None:
    assert summary.columns({"picker": Run("", "", 1, 0)}) == {}


def test_the_view_shows_every_server_and_every_process(gateway: Gateway) -> None:
    gauge = view.Gauge([Replica(gateway.picker.child, gateway.picker.grpc, gateway.picker.metrics)])
    gauge.read_servers(Fleet("all", gateway.fleet.child, gateway.fleet.file, gateway.fleet.addresses))
    gauge.read_workers(1.0)
    assert [server.name for server in gauge.servers] == [f"{host}:{port}" for host, port in gateway.fleet.addresses]
    workers = [worker for worker in gauge.workers if worker.name.startswith("worker")]
    assert [worker.name for worker in workers] == [f"worker {n}" for n in range(WORKERS)]
    assert all(worker.streams is not None for worker in workers)
    console = Console(file=io.StringIO(), record=True, width=120)
    console.print(view.drawn("picker, 1 s", gauge, [answer((0, 0, 0), 0.1, 80)], "curl"))
    screen = console.export_text()
    assert "worker 3" in screen
    assert gauge.servers[0].name in screen
    assert "1 requests, 0 errors" in view.line("picker", gauge, [answer((0, 0, 0), 0.1, 80)])


def test_several_pickers_are_shown_by_number(gateway: Gateway) -> None:
    picker = Replica(gateway.picker.child, gateway.picker.grpc, gateway.picker.metrics)
    gauge = view.Gauge([picker, picker])
    gauge.read_workers(1.0)
    names = {worker.name for worker in gauge.workers}
    assert {f"picker {number} worker {n}" for number in (1, 2) for n in range(WORKERS)} <= names


def test_without_a_store_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="apt-get install redis-server"):
        store_path()


def test_one_envoy_spreads_over_all_pickers_at_random() -> None:
    config = envoy_config.bootstrap(picker=("127.0.0.1", 1), replicas=[("127.0.0.1", 2), ("127.0.0.1", 3)])
    (cluster,) = (c for c in config["static_resources"]["clusters"] if c["name"] == envoy_config.PICKER_CLUSTER)
    (locality,) = cluster["load_assignment"]["endpoints"]
    ports = [host["endpoint"]["address"]["socket_address"]["port_value"] for host in locality["lb_endpoints"]]
    assert (cluster["lb_policy"], ports) == ("RANDOM", [1, 2, 3])
