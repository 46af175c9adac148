"""Explanations of a real picker's decisions, through its supervisor."""

import json
from typing import Any

from tests.e2e.cluster import COMPLETIONS, ask, completion, run
from tests.e2e.conftest import SERVERS, Gateway
from workers.cli.demo.children import python


def explain(gateway: Gateway, *flags: str) -> Any:
    return run(python("workers", "explain", f"--url=http://127.0.0.1:{gateway.picker.metrics}", *flags))


def test_the_last_decision_lists_the_candidates_and_the_scores_of_the_target(gateway: Gateway) -> None:
    answer = ask(gateway.port, COMPLETIONS, completion("explain this " * 100))
    done = explain(gateway, "--json")
    assert done.returncode == 0, done.stderr
    (decision,) = json.loads(done.stdout)["decisions"]
    (profile,) = decision["profiles"]
    assert len(profile["candidates"]) == SERVERS
    picked = profile["candidates"][0]
    assert picked["picked"] and picked["address"] == decision["targets"][0]
    assert answer.server.rpartition(":")[2] in picked["address"] or answer.server in picked["endpoint"]
    for candidate in profile["candidates"]:
        total = sum(score["weighted"] for score in candidate["scores"])
        assert abs(total - candidate["total"]) < 0.01
    assert "explain this" not in done.stdout


def test_every_recent_request_is_found_by_its_id_on_any_worker(gateway: Gateway) -> None:
    for number in range(8):
        ask(gateway.port, COMPLETIONS, completion(f"number {number}"))
    decisions = json.loads(explain(gateway, "--n=64", "--json").stdout)["decisions"]
    assert len({decision["worker"] for decision in decisions}) > 1
    for decision in decisions[:3]:
        done = explain(gateway, f"--request-id={decision['request_id']}")
        assert done.returncode == 0 and decision["request_id"] in done.stdout
        assert decision["targets"][0] in done.stdout
    assert explain(gateway, "--request-id=no-such-request").returncode == 1


def test_a_receipt_of_the_response_opens_the_decision(gateway: Gateway) -> None:
    answer = ask(gateway.port, COMPLETIONS, completion("a receipt, please " * 60), {"x-llm-d-debug": "receipt"})
    receipt = answer.headers["x-llm-d-receipt"]
    done = explain(gateway, f"--id={receipt}")
    assert done.returncode == 0, done.stderr
    opened = json.loads(explain(gateway, f"--id={receipt}", "--json").stdout)
    assert opened["explanation"]["targets"][0] in opened["target"]
    assert opened["target"] in done.stdout
    assert "a receipt, please" not in done.stdout
    assert "x-llm-d-receipt" not in ask(gateway.port, COMPLETIONS, completion("no receipt")).headers


def test_a_forged_receipt_is_refused_with_the_cause(gateway: Gateway) -> None:
    answer = ask(gateway.port, COMPLETIONS, completion("hello"), {"x-llm-d-debug": "receipt"})
    receipt = answer.headers["x-llm-d-receipt"]
    forged = receipt[:20] + ("A" if receipt[20] != "A" else "B") + receipt[21:]
    done = explain(gateway, f"--id={forged}")
    assert done.returncode == 1
    assert "was not signed here" in done.stderr
