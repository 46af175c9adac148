"""Parts of the demo for themselves: the users' script, the comparison, the reading of pages."""

import io

from rich.console import Console

from tests.e2e.conftest import WORKERS, Gateway
from workers.demo import summary, view
from workers.demo.stack import Fleet
from workers.demo.traffic import Key, Result, Run, User, system_prompts

SEED = 7


def script(seed: int, turns: int) -> list[tuple[Key, str, int]]:
    told = zip(range(turns), User(3, seed, system_prompts(seed)).turns(), strict=False)
    return [(turn.key, turn.question, turn.answer_tokens) for _, (turn, _) in told]


def answer(key: Key, first_s: float, cached: int) -> Result:
    return Result(key, "", first_s, first_s * 2, 100, cached)


def test_the_same_seed_says_the_same() -> None:
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


def test_runs_are_compared_over_what_both_finished() -> None:
    both, one, failed = (0, 0, 0), (0, 0, 1), (0, 0, 2)
    fast = Run("", "", 1, 0, [answer(both, 0.1, 80), answer(one, 9.0, 0), answer(failed, 0.1, 80)], 2.0)
    slow = Run("", "", 1, 0, [answer(both, 0.4, 20), Result(failed, "status 503")], 2.0)
    shown = summary.columns({"picker": fast, "round robin": slow})
    assert [each.compared for each in shown.values()] == [1, 1]
    assert [each.errors for each in shown.values()] == [0, 1]
    assert [round(each.first_token_p95_ms) for each in shown.values()] == [100, 400]
    assert [each.cached_share for each in shown.values()] == [0.8, 0.2]
    assert set(summary.as_json(shown)) == {"picker", "round_robin"}


def test_what_the_picker_predicted_stands_beside_what_was_cached() -> None:
    picker = Run("", "", 1, 0, [answer((0, 0, 0), 0.1, 80)], 2.0, predicted_share=0.75)
    other = Run("", "", 1, 0, [answer((0, 0, 0), 0.4, 20)], 2.0)
    shown = summary.columns({"picker": picker, "round robin": other})
    assert [each.predicted_share for each in shown.values()] == [0.75, None]
    console = Console(file=io.StringIO(), record=True, width=120)
    console.print(summary.table(shown))
    (line,) = (line for line in console.export_text().splitlines() if "predicted by the picker" in line)
    assert line.split("│")[2:4] == ["    75% ", "           – "]


def test_a_run_that_saw_nothing_is_left_out() -> None:
    assert summary.columns({"picker": Run("", "", 1, 0)}) == {}


def test_the_view_shows_every_server_and_every_process(gateway: Gateway) -> None:
    gauge = view.Gauge(gateway.picker.child.pid, gateway.picker.metrics)
    gauge.read_servers(Fleet("all", gateway.fleet.child, gateway.fleet.file, gateway.fleet.addresses))
    gauge.read_workers(1.0)
    assert [server.name for server in gauge.servers] == [f"{host}:{port}" for host, port in gateway.fleet.addresses]
    workers = [worker for worker in gauge.workers if worker.name.startswith("worker")]
    assert [worker.name for worker in workers] == [f"worker {n}" for n in range(WORKERS)]
    assert all(worker.streams is not None for worker in workers)
    console = Console(file=io.StringIO(), record=True, width=120)
    console.print(view.drawn("picker, 1 s", gauge, [answer((0, 0, 0), 0.1, 80)], "curl"))
    shown = console.export_text()
    assert "worker 3" in shown
    assert gauge.servers[0].name in shown
    assert "1 requests, 0 errors" in view.line("picker", gauge, [answer((0, 0, 0), 0.1, 80)])
