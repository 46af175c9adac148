"""The picker's index equals what simulated servers of every dialect hold, also after faults, and requests go where their prompt is."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

from epp.prefix.streams import PARTIAL
from loadtest.demo.children import python
from loadtest.demo.stack import LOOPBACK
from tests.e2e.cluster import Cluster, eventually, run
from tests.e2e.precise_world import SimWorld

DIALECTS = "vllm,vllm-map,sglang,sglang-map"
PROMPTS = 64  # the first choice is random: of so many, each of four servers gets one
FEW = 16  # and of so many, each of two servers


def text(seed: int) -> str:
    return f"conversation {seed:03} " * 60


def test_servers_of_every_dialect_are_followed_exactly(cluster: Cluster) -> None:
    world = SimWorld(cluster, 4, "--kv-dialect", DIALECTS, "--kv-old-replay", "--kv-first", "1")
    before = [world.chat(text(seed)).server for seed in range(PROMPTS)]
    assert len(set(before)) == 4
    assert eventually(lambda: world.held() == world.cached())
    assert eventually(world.all_precise)
    answers = [world.chat(text(seed), "and more") for seed in range(PROMPTS)]
    assert [answer.server for answer in answers] == before
    assert min(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers) > 250
    assert eventually(lambda: world.held() == world.cached())
    seen = world.top()
    assert [endpoint["not_precise"] for endpoint in seen] == [""] * 4
    assert [endpoint["held_blocks"] for endpoint in seen] == world.cached()
    counter = world.picker.counter
    assert counter("kv_cache_index_lookup_requests_total") >= PROMPTS
    assert counter("kv_cache_index_lookup_hits_total") >= PROMPTS * 16


def test_evicted_blocks_are_not_matched(cluster: Cluster) -> None:
    world = SimWorld(cluster, 2, "--kv-blocks", "64", "--cpu-blocks", "40")
    for seed in range(24):
        assert world.chat(text(seed)).status == 200
    assert eventually(world.all_precise)
    counters = world.picker.counter
    assert eventually(lambda: counters("kv_cache_index_evictions_total") > 100)
    assert counters("kv_cache_events_removals_skipped_total") == 0
    assert counters("kv_cache_events_stores_skipped_total") == 0


def test_faults_of_a_publisher_cost_precision_for_a_while_and_no_request(cluster: Cluster) -> None:
    world = SimWorld(cluster, 2)
    for seed in range(FEW):
        world.chat(text(seed))
    assert eventually(world.all_precise)
    for kind in ("kv-lost", "kv-jump", "kv-garbage"):
        for server in range(2):
            world.fault(server, kind)
        assert {world.chat(f"{kind} {text(seed)}").status for seed in range(FEW)} == {200}
        for server in range(2):
            world.fault(server, "none")
    assert {world.chat(f"again {text(seed)}").status for seed in range(FEW)} == {200}
    # What the messages had that the jump left out stays unknown.
    assert eventually(lambda: {endpoint["not_precise"] for endpoint in world.top()} == {PARTIAL})
    counter = world.picker.counter
    assert eventually(lambda: counter("kv_cache_events_gaps_total") > 0)
    assert eventually(lambda: counter("kv_cache_events_malformed_total") > 0)


def test_a_server_that_starts_again_holds_nothing(cluster: Cluster) -> None:
    world = SimWorld(cluster, 2)
    for seed in range(FEW):
        world.chat(text(seed))
    assert eventually(lambda: world.all_precise() and world.held() == world.cached())
    world.fault(1, "vanish")
    assert eventually(lambda: world.precise() == [True, False])
    world.fault(1, "none")
    assert eventually(lambda: world.cached()[1] == 0 and world.held()[1] == 0)
    for seed in range(FEW):
        assert world.chat(f"after {text(seed)}").status == 200
    assert eventually(lambda: world.all_precise() and world.held() == world.cached())


class _Refuses(BaseHTTPRequestHandler):
    """Answers as vLLM without --enable-scale-out."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_error(403)

    def log_message(self, *_: object) -> None:
        pass


def test_without_tokens_nobody_says_precise_and_all_name_the_server_the_status_and_the_fix(cluster: Cluster) -> None:
    why = "no tokens (403 from /v1/chat/completions/render: start vLLM with --enable-scale-out)"
    with HTTPServer((LOOPBACK, 0), _Refuses) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        render = f"{LOOPBACK}:{server.server_port}"
        world = SimWorld(cluster, 2, render=render)
        where = (f"--metrics-port={world.picker.metrics}", f"--run-dir={cluster.directory / 'run'}")

        def named() -> bool:
            found = json.loads(run(python("workers", "doctor", *where, "--json")).stdout)["findings"]
            return any(each["rule"] == "tokens" and render in each["title"] and "403" in each["evidence"] for each in found)

        assert eventually(named)  # before there was a request
        for seed in range(FEW):
            assert world.chat(text(seed)).status == 200
        assert eventually(world.all_precise)  # the streams are
        assert [endpoint["not_precise"] for endpoint in world.top()] == [why] * 2
        done = run(python("workers", "explain", *where, "--json"))
        (decision,) = json.loads(done.stdout)["decisions"]
        (profile,) = decision["profiles"]
        assert {each["prefix_cache"] for each in profile["candidates"]} == {f"approximate: {why}"}
        assert world.picker.counter("requests_without_tokens_total") >= 8
        server.shutdown()
