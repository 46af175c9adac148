"""Explanations of a real picker's decisions, through its supervisor."""

import base64
import itertools
import json
import uuid
from typing import Any

import pytest

from loadtest.demo.children import python
from tests.e2e.cluster import COMPLETIONS, Cluster, ask, completion, eventually, run
from tests.e2e.conftest import SERVERS, WORKERS, Gateway

ASKS = {"x-llm-d-debug": "receipt"}


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


def test_a_decision_that_no_worker_remembers_is_found_in_the_recording(gateway: Gateway) -> None:
    wanted, tenant = str(uuid.uuid4()), {"x-llm-d-inference-fairness-id": "slow-tenant"}
    ask(gateway.port, COMPLETIONS, completion("the first one"), {"x-request-id": wanted, **tenant})
    for number in range(40 * WORKERS):
        ask(gateway.port, COMPLETIONS, completion(f"number {number}", max_tokens=1))
    beside = (f"--metrics-port={gateway.picker.metrics}", f"--run-dir={gateway.cluster.directory / 'run'}")

    def explained(*flags: str) -> Any:
        return run(python("workers", "explain", *beside, *flags))

    assert eventually(lambda: explained(f"--request-id={wanted}").returncode == 0, 10.0)
    said = explained(f"--request-id={wanted}").stdout
    assert "first byte after" in said and "with status 200" in said and "decided after" in said
    found = json.loads(explained("--flow=slow-tenant", "--at=1m", "--json").stdout)["decisions"]
    assert len(found) == 1
    target = found[0]["targets"][0]
    answered = explained(f"--endpoint={target}", "--n=3", "--json")
    assert answered.returncode == 0, answered.stderr
    several = json.loads(answered.stdout)["decisions"]
    assert len(several) == 3 and {decision["targets"][0] for decision in several} == {target}
    missing = explained("--flow=nobody")
    assert missing.returncode == 1 and "has a decision on a request of flow nobody" in missing.stderr


def test_without_a_recording_it_says_why_it_knows_no_more(cluster: Cluster, gateway: Gateway) -> None:
    picker = cluster.picker(gateway.fleet.file, "--record-dir=none", workers=1)
    refused = run(python("workers", "explain", f"--url=http://127.0.0.1:{picker.metrics}", "--flow=any"))
    assert refused.returncode == 1 and "nothing is recorded: --record-dir is none" in refused.stderr


@pytest.fixture(scope="module")
def debugged(gateway: Gateway) -> Gateway:
    """The gateway of a picker that trusts x-llm-d-debug."""
    picker = gateway.cluster.picker(gateway.fleet.file, "--trust-client-headers=fairness,debug", workers=2)
    return gateway._replace(port=gateway.cluster.envoy(picker, threads=1), picker=picker)


def test_a_receipt_of_the_response_opens_the_decision(debugged: Gateway) -> None:
    answer = ask(debugged.port, COMPLETIONS, completion("a receipt, please " * 60), ASKS)
    receipt = answer.headers["x-llm-d-receipt"]
    done = explain(debugged, receipt)
    assert done.returncode == 0, done.stderr
    opened = json.loads(explain(debugged, receipt, "--json").stdout)
    assert opened["explanation"]["targets"][0] in opened["target"]
    assert opened["target"] in done.stdout
    assert "a receipt, please" not in done.stdout
    assert "x-llm-d-receipt" not in ask(debugged.port, COMPLETIONS, completion("no receipt")).headers


def test_by_default_no_client_gets_a_receipt(gateway: Gateway) -> None:
    answer = ask(gateway.port, COMPLETIONS, completion("a receipt, please"), ASKS)
    assert answer.status == 200
    assert "x-llm-d-receipt" not in answer.headers


def test_receipts_of_a_cached_and_of_a_new_prompt_look_alike(debugged: Gateway) -> None:
    """Their holder sees no byte and no length that depends on what the servers have cached."""
    prompts = ["of another tenant " * 200] * 2 + ["of nobody " * 200]
    texts = [ask(debugged.port, COMPLETIONS, completion(p), ASKS).headers["x-llm-d-receipt"] for p in prompts]
    opened = [json.loads(explain(debugged, text, "--json").stdout) for text in texts]
    assert opened[1]["cached_tokens"] > (opened[2]["cached_tokens"] or 0)
    assert len({len(text) for text in texts}) == 1
    for one, two in itertools.combinations(map(base64.urlsafe_b64decode, texts), 2):
        assert sum((a ^ b).bit_count() for a, b in zip(one[1:], two[1:], strict=True)) > len(one) * 8 / 4


def test_a_forged_receipt_is_refused_with_the_cause(debugged: Gateway) -> None:
    receipt = ask(debugged.port, COMPLETIONS, completion("hello"), ASKS).headers["x-llm-d-receipt"]
    forged = receipt[:20] + ("A" if receipt[20] != "A" else "B") + receipt[21:]
    done = explain(debugged, forged)
    assert done.returncode == 1
    assert "was not made here" in done.stderr
