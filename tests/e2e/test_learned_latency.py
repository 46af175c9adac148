"""What the picker learns of latencies, with simulated servers behind a real Envoy: predictions without sidecars, and P/D decisions."""

import asyncio
import os
import random
import signal
from pathlib import Path

from tests.e2e.cluster import COMPLETIONS, Cluster, Fleet, Picker, ask_all, completion, eventually
from tests.e2e.test_warm import child_pid, stop

CONFIGS = Path(__file__).resolve().parents[2] / "deploy" / "config"
SHIPPED_PATH = "/etc/epp/endpoints.yaml"
SLOW = ("--prefill-us-per-token=100", "--decode-ms=2")
ROUND, ROUNDS = 16, 8
TOLD = "llm_d_epp_request_predicted_ttft_seconds_count"
TERMS = "llm_d_epp_learned_latency_seconds"
USED = "llm_d_epp_learned_latency_model_used"
DECISIONS = "llm_d_epp_disagg_decision_total"


def play(port: int, name: str, prompt_bytes: int, rounds: int = ROUNDS) -> None:
    """Sends streamed requests with different prompts, a round after another."""
    rng = random.Random(name)
    for _ in range(rounds):
        bodies = [completion(rng.randbytes(prompt_bytes // 2).hex(), max_tokens=4, stream=True) for _ in range(ROUND)]
        answers = asyncio.run(ask_all(port, COMPLETIONS, bodies, 0.3))
        assert {answer.status for answer in answers} == {200}, [answer.body for answer in answers if answer.status != 200]


def page_sum(picker: Picker, name: str, *labels: str) -> float:
    """Returns the sum of the values of the lines with this name and these texts."""
    lines = [line for line in picker.page().splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels))


def test_latencies_are_predicted_without_sidecars(cluster: Cluster) -> None:
    fleet = cluster.fleet(3, *SLOW)
    text = (CONFIGS / "latency-aware.yaml").read_text().replace(SHIPPED_PATH, str(fleet.file))
    assert "    streamingMode: true" in text
    text = text.replace("    streamingMode: true", "    streamingMode: true\n    backend: built-in")
    picker = cluster.picker(fleet.file, workers=2, config_text=text)
    port = cluster.envoy(picker)
    play(port, "predicted", 2_000)
    assert eventually(lambda: page_sum(picker, TOLD) > 0), "no request was predicted"
    assert page_sum(picker, USED) == 1
    assert "prediction server" not in picker.child.log.read_text()


def roles(cluster: Cluster, decoders: Fleet, prefillers: Fleet) -> Path:
    """Writes the endpoints of both fleets, with their roles."""
    file = cluster.directory / "roles.yaml"
    entries = [
        f'- {{name: {role}-{n}, address: "{host}", port: "{port}", labels: {{llm-d.ai/role: {role}}}}}\n'
        for role, fleet in (("decode", decoders), ("prefill", prefillers))
        for n, (host, port) in enumerate(fleet.addresses)
    ]
    file.write_text("endpoints:\n" + "".join(entries))
    return file


def test_prefill_and_decode_servers_learn_separately(cluster: Cluster) -> None:
    file = roles(cluster, cluster.fleet(2, *SLOW), cluster.fleet(2, *SLOW))
    text = (CONFIGS / "pd-learned.yaml").read_text().replace(SHIPPED_PATH, str(file))
    picker = cluster.picker(file, workers=2, config_text=text)
    port = cluster.envoy(picker)
    play(port, "short", 400, rounds=4)  # fewer than nonCachedTokens: computed by decode servers
    assert page_sum(picker, DECISIONS, 'decision_type="decode-only"') > 0
    play(port, "long", 4_000)
    assert page_sum(picker, DECISIONS, 'decision_type="prefill-decode"') > 0
    errors = "llm_d_epp_learned_latency_error_ratio_count"
    for role in ("decode", "prefill"):
        assert eventually(lambda role=role: page_sum(picker, errors, f"{role}-") > 0), f"no {role} server has learned"  # type: ignore[misc]


def test_what_was_learned_survives_killed_processes_and_a_restart(cluster: Cluster) -> None:
    fleet = cluster.fleet(3, *SLOW)
    state = f"--state-dir={cluster.directory / 'state'}"
    picker = cluster.picker(fleet.file, state, workers=2)
    port = cluster.envoy(picker)
    play(port, "learned", 2_000)
    assert eventually(lambda: page_sum(picker, USED) == 1)
    before = page_sum(picker, TERMS)

    pids = {name: child_pid(picker, name) for name in ("supervisor", "worker 0")}
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: all(child_pid(picker, name) != pid for name, pid in pids.items()))
    assert eventually(lambda: abs(page_sum(picker, TERMS) - before) < 0.2 * before), "the successor began anew"
    play(port, "again", 2_000, rounds=2)
    before = page_sum(picker, TERMS)
    stop(cluster, picker)

    again = cluster.picker(fleet.file, state, workers=2)
    assert eventually(lambda: page_sum(again, USED) == 1), "a restarted picker knows nothing"
    assert abs(page_sum(again, TERMS) - before) < 0.2 * before


def test_the_page_has_what_autoscalers_read(cluster: Cluster) -> None:
    fleet = cluster.fleet(2, *SLOW)
    picker = cluster.picker(fleet.file, workers=1)
    play(cluster.envoy(picker), "load", 400, rounds=1)
    for name in (
        "llm_d_epp_flow_control_pool_saturation",
        "llm_d_epp_flow_control_queue_size",
        "inference_objective_running_requests",
        "inference_pool_ready_pods",
    ):
        lines = [line for line in picker.page().splitlines() if line.startswith((name + " ", name + "{"))]
        assert lines, f"{name} is not on the page"
    assert page_sum(picker, "inference_pool_ready_pods") == 2
