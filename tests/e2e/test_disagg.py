"""Disaggregated serving through Envoy, with the configurations of deploy/: each answer names the servers of its stages."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from loadtest.demo.children import python
from tests.e2e.cluster import CHAT, COMPLETIONS, MODEL, Answer, Cluster, Fleet, Picker, ask, ask_all, completion, events, eventually, run
from tests.e2e.conftest import FAST

CONFIGS = Path(__file__).resolve().parents[2] / "deploy" / "config"
SHIPPED_PATH = "/etc/epp/endpoints.yaml"
ROLES = ("prefill", "prefill", "decode", "decode", "encode")
PREFILL, DECODE, ENCODE = {"sim-0", "sim-1"}, {"sim-2", "sim-3"}, {"sim-4"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
DECISION = r'^llm_d_epp_disagg_decision_total\{[^}]*decision_type="%s"[^}]*\} (\S+)$'


class Site(NamedTuple):
    """One gateway in front of the servers, with one of the configurations."""

    port: int
    picker: Picker

    def decisions(self, kind: str) -> float:
        match = re.search(DECISION % kind, self.picker.page(), re.MULTILINE)
        return float(match[1]) if match else 0.0


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def fleet(shared_cluster: Cluster) -> Fleet:
    return shared_cluster.fleet(len(ROLES), "--role", ",".join(ROLES), *FAST)


def site(cluster: Cluster, name: str, endpoints: Path, **changes: str) -> Site:
    text = (CONFIGS / name).read_text().replace(SHIPPED_PATH, str(endpoints))
    for old, new in changes.items():
        assert old.replace("_", "-") in text
        text = text.replace(old.replace("_", "-"), new)
    picker = cluster.picker(endpoints, workers=2, config_text=text)
    return Site(cluster.envoy(picker), picker)


@pytest.fixture(scope="module")
def pd(shared_cluster: Cluster, fleet: Fleet) -> Site:
    return site(shared_cluster, "pd.yaml", fleet.file)


@pytest.fixture(scope="module")
def epd(shared_cluster: Cluster, fleet: Fleet) -> Site:
    return site(shared_cluster, "epd.yaml", fleet.file)


def long_prompt(name: str) -> str:
    """Returns a prompt of 500 tokens. Remote prefill is worthwhile only if more than half of them are new."""
    return f"{name}: " + "once upon a time " * 118


def prefiller(answer: Answer) -> str | None:
    assert answer.status == 200, answer.body[:300]
    assert answer.server in DECODE
    return answer.headers.get("x-sim-prefiller")


def looking(text: str, *images: dict[str, Any]) -> bytes:
    parts = [{"type": "text", "text": text}, *images]
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 2}).encode()


def test_a_long_new_prompt_is_computed_by_a_prefill_server_and_a_short_one_by_the_decode_server(pd: Site) -> None:
    before = pd.decisions("prefill-decode"), pd.decisions("decode-only")
    assert prefiller(ask(pd.port, COMPLETIONS, completion(long_prompt("new"), max_tokens=3))) in PREFILL
    assert prefiller(ask(pd.port, COMPLETIONS, completion("short", max_tokens=3))) is None
    after = pd.decisions("prefill-decode"), pd.decisions("decode-only")
    assert (after[0] - before[0], after[1] - before[1]) == (1, 1)


def test_a_prompt_that_the_decode_server_has_cached_is_not_prefilled_again(pd: Site) -> None:
    first = ask(pd.port, COMPLETIONS, completion(long_prompt("again"), max_tokens=1))
    assert prefiller(first) in PREFILL

    def again() -> bool:  # an update of the prefix index reaches all workers within milliseconds
        answer = ask(pd.port, COMPLETIONS, completion(long_prompt("again"), max_tokens=1))
        return prefiller(answer) is None and answer.server == first.server

    assert eventually(again)


def test_a_streamed_answer_names_both_hops_and_has_all_its_tokens(pd: Site) -> None:
    answer = ask(pd.port, COMPLETIONS, completion(long_prompt("stream"), max_tokens=6, stream=True))
    assert prefiller(answer) in PREFILL
    assert sum(1 for event in events(answer.body) if event["choices"]) == 6


def test_a_client_cannot_choose_the_prefill_or_encode_server(pd: Site, fleet: Fleet) -> None:
    host, port = fleet.addresses[0]
    forged = {"x-prefiller-host-port": f"{host}:{port}", "x-encoder-hosts-ports": f"{host}:{port}"}
    before = fleet.stats()[0]["requests"]
    answer = ask(pd.port, CHAT, looking("forged", IMAGE), forged)
    assert prefiller(answer) is None
    assert "x-sim-encoders" not in answer.headers
    assert fleet.stats()[0]["requests"] == before
    unreachable = {"x-prefiller-host-port": "127.0.0.1:1"}
    assert prefiller(ask(pd.port, COMPLETIONS, completion(long_prompt("forged"), max_tokens=1), unreachable)) in PREFILL


def test_the_servers_count_both_hops(pd: Site, fleet: Fleet) -> None:
    before = fleet.stats()
    assert prefiller(ask(pd.port, COMPLETIONS, completion(long_prompt("counted"), max_tokens=1))) in PREFILL
    grown = {
        name: sum(after[name] - then[name] for after, then in zip(fleet.stats(), before, strict=True))
        for name in ("requests", "prefilled_for_others", "prefilled_elsewhere", "stage_errors")
    }
    assert grown == {"requests": 2, "prefilled_for_others": 1, "prefilled_elsewhere": 1, "stage_errors": 0}


def test_a_burst_spreads_over_the_prefill_servers_between_two_scrapes(pd: Site) -> None:
    bodies = [completion(long_prompt(f"burst {n}"), max_tokens=1) for n in range(12)]
    prefillers = [prefiller(answer) for answer in asyncio.run(ask_all(pd.port, COMPLETIONS, bodies))]
    assert set(prefillers) == PREFILL


def test_images_are_encoded_elsewhere_and_a_long_prompt_is_prefilled_elsewhere(epd: Site) -> None:
    text = long_prompt("pictures")
    plain = ask(epd.port, CHAT, looking("no pictures"))
    assert prefiller(plain) is None and "x-sim-encoders" not in plain.headers
    short = ask(epd.port, CHAT, looking("two pictures", IMAGE, IMAGE))
    assert short.headers["x-sim-encoders"] == "sim-4,sim-4"
    whole = ask(epd.port, CHAT, looking(text, IMAGE))
    assert prefiller(whole) in PREFILL
    assert whole.headers["x-sim-encoders"] == "sim-4"
    assert epd.decisions("decode-only") == 1
    assert epd.decisions("encode-prefill-decode") >= 1


def test_without_prefill_servers_requests_are_refused_if_so_configured(shared_cluster: Cluster, fleet: Fleet) -> None:
    decoders = shared_cluster.directory / "decoders.yaml"
    entries = fleet.file.read_text().split("- name: ")
    decoders.write_text("- name: ".join([entries[0], *(entry for entry in entries if '"decode"' in entry)]))
    alone = site(shared_cluster, "pd.yaml", decoders, decode_only="refuse")
    refused = ask(alone.port, COMPLETIONS, completion(long_prompt("refused"), max_tokens=1))
    assert refused.status == 429
    assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
    assert prefiller(ask(alone.port, COMPLETIONS, completion("short", max_tokens=1))) is None
    assert "disagg_stage_unserved_total{" in alone.picker.page() and 'outcome="refused"' in alone.picker.page()
    assert "requests are refused" in alone.picker.child.text()


def test_nothing_stays_in_flight(pd: Site) -> None:
    assert eventually(lambda: pd.picker.in_flight() == [])


@pytest.mark.parametrize("name", ["pd.yaml", "pd-learned.yaml", "epd.yaml"])
def test_epp_check_accepts_the_shipped_configurations(name: str) -> None:
    done = run(python("workers", "check", "--quiet", str(CONFIGS / name)))
    assert (done.returncode, done.stderr) == (0, "")
