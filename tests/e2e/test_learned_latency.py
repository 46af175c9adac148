"""What the picker learns of latencies, with simulated servers behind a real Envoy: predictions without sidecars, and P/D decisions."""

import asyncio
import random
from pathlib import Path

from tests.e2e.cluster import COMPLETIONS, Cluster, Fleet, Picker, ask_all, completion, eventually

CONFIGS = Path(__file__).resolve().parents[2] / "deploy" / "config"
SHIPPED_PATH = "/etc/epp/endpoints.yaml"
SLOW = ("--prefill-us-per-token=100", "--decode-ms=2")
ROUND, ROUNDS = 16, 8
TOLD = "llm_d_epp_request_predicted_ttft_seconds_count"
DECISIONS = "llm_d_epp_disagg_decision_total"


def play(port: int, name: str, prompt_bytes: int, rounds: int = ROUNDS) -> None:
    """Sends streamed requests with different prompts, a round after another."""
    rng = random.Random(name)
    for _ in range(rounds):
        bodies = [completion(rng.randbytes(prompt_bytes // 2).hex(), max_tokens=4, stream=True) for _ in range(ROUND)]
        answers = asyncio.run(ask_all(port, COMPLETIONS, bodies, 0.3))
        assert {answer.status for answer in answers} == {200}, [
            answer.body for answer in answers if answer.status != 200
        ]


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
    assert page_sum(picker, "llm_d_epp_learned_latency_model_used") == 1
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
