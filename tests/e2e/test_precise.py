"""The picker routes by the KV events of model servers, and falls back for an endpoint whose stream is not whole.

Each server has a publisher of KV events in this test's process. Prompts are token ids, so that no tokenizer is needed.
"""

import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import yaml
import zmq

from loadtest.demo.ports import free_row
from loadtest.demo.stack import LOOPBACK
from loadtest.sim.kv_publisher import KvPublisher, blocks_of
from loadtest.sim.kv_settings import KEPT
from tests.e2e.cluster import COMPLETIONS, MODEL, Cluster, Fleet, Picker, ask, eventually
from tests.e2e.conftest import FAST
from tests.e2e.test_warm import child_pid

SERVERS = 3
BLOCK = 16

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {{type: file-discovery, parameters: {{path: {endpoints}}}}}
- {{type: token-producer, parameters: {{modelName: m, vllm: {{url: "http://127.0.0.1:9"}}}}}}
- {{type: endpoint-notification-source}}
- type: precise-prefix-cache-producer
  parameters:
    tokenProcessorConfig: {{blockSizeTokens: 16}}
    indexerConfig: {{kvBlockIndexConfig: {{enableMetrics: true}}}}
    speculativeIndexing: {speculates}
    kvEventsConfig:
      discoverPods: true
      podDiscoveryConfig: {{socketPort: {port}{replay}}}
- {{type: prefix-cache-scorer, parameters: {{prefixMatchInfoProducerName: precise-prefix-cache-producer}}}}
dataLayer:
  discovery: {{pluginRef: file-discovery}}
  sources:
  - {{pluginRef: endpoint-notification-source, extractors: [{{pluginRef: precise-prefix-cache-producer}}]}}
schedulingProfiles:
- {{name: default, plugins: [{{pluginRef: prefix-cache-scorer, weight: 2}}]}}
"""


class World:
    """Holds servers, their publishers and a picker."""

    def __init__(
        self, cluster: Cluster, fleet: Fleet, *, replay: bool, speculates: bool = False, flags: Sequence[str] = (), kept: int = KEPT
    ) -> None:
        """`replay`: whether servers have replay sockets. `flags`: of the picker. `kept`: how many messages a server keeps for replays."""
        self.context: zmq.Context = zmq.Context()
        self.port = free_row(2 * SERVERS)
        self.replays = replay
        self.kept = kept
        self.publishers = [self.publisher(rank) for rank in range(SERVERS)]
        self.addresses = fleet.addresses
        listed = [{"name": f"sim-rank-{rank}", "address": host, "port": port} for rank, (host, port) in enumerate(fleet.addresses)]
        file = cluster.directory / "named.yaml"
        file.write_text(yaml.safe_dump({"endpoints": listed}))
        self.closing, self.closed = threading.Lock(), set[KvPublisher]()
        self.stopped = threading.Event()
        self.answering = threading.Thread(target=self._answer, daemon=True)
        self.answering.start()
        text = CONFIG.format(
            endpoints=file,
            port=self.port,
            speculates=str(speculates).lower(),
            replay=f", replaySocketPort: {self.port + SERVERS}" if replay else "",
        )
        self.cluster = cluster
        self.config_text = text
        self.picker = cluster.picker(Path("unused"), *flags, workers=2, config_text=text)
        self.gateway = cluster.envoy(self.picker)

    def publisher(self, rank: int, make: Callable[..., KvPublisher] = KvPublisher) -> KvPublisher:
        replay = f"tcp://{LOOPBACK}:{self.port + SERVERS + rank}" if self.replays else ""
        return make(self.context, f"tcp://{LOOPBACK}:{self.port + rank}", replay, kept=self.kept)

    def _answer(self) -> None:
        while not self.stopped.wait(0.01):
            with self.closing:
                for publisher in self.publishers:
                    if publisher not in self.closed:
                        publisher.answer_replays()

    def close(self) -> None:
        self.stopped.set()
        self.answering.join()
        self.context.destroy(0)

    def cut(self, rank: int) -> None:
        """Closes the sockets of a publisher."""
        with self.closing:  # a socket belongs to one thread at a time
            self.closed.add(self.publishers[rank])
            self.publishers[rank].close()

    def start_again(self, rank: int, make: Callable[..., KvPublisher] = KvPublisher) -> None:
        """Replaces a publisher by a new one, which has published nothing. `make`: the class of the new one."""
        self.cut(rank)
        made: list[KvPublisher] = []

        def bound() -> bool:
            with contextlib.suppress(zmq.ZMQError):
                made.append(self.publisher(rank, make))
            return bool(made)

        assert eventually(bound)  # a thread of ZeroMQ closes the old sockets a little later
        self.publishers[rank] = made[0]

    def hold(self, rank: int, tokens: Sequence[int]) -> list[int]:
        """Publishes that server `rank` holds this prompt. Returns the hashes of its blocks."""
        publisher = self.publishers[rank]
        hashes = list(blocks_of(tokens, BLOCK))
        publisher.publish([publisher.dialect.stored(hashes, None, tokens[: len(hashes) * BLOCK], BLOCK)])
        return hashes

    def drop(self, rank: int, hashes: Sequence[int]) -> None:
        publisher = self.publishers[rank]
        publisher.publish([publisher.dialect.removed(hashes)])

    def target(self, tokens: Sequence[int]) -> int:
        """Sends this prompt. Returns the number of the server that gets it."""
        answer = ask(self.gateway, COMPLETIONS, json.dumps({"model": MODEL, "prompt": list(tokens), "max_tokens": 1}).encode())
        assert answer.status == 200, answer
        return int(answer.server.removeprefix("sim-"))

    def precise(self, picker: Picker | None = None) -> dict[str, bool]:
        page = (picker or self.picker).page()
        found = re.findall(r'^llm_d_epp_kv_cache_events_precise\{.*pod_identifier="([^"]+)"\} (\d)', page, re.MULTILINE)
        return {name: value == "1" for name, value in found}

    def all_precise(self, picker: Picker | None = None) -> bool:
        values = self.precise(picker).values()
        return len(values) == SERVERS and all(values)

    def held(self, rank: int, picker: Picker | None = None) -> float:
        page = (picker or self.picker).page()
        found = re.search(rf'^llm_d_epp_kv_cache_events_held_blocks\{{.*"sim-rank-{rank}"\}} (\S+)', page, re.MULTILINE)
        return float(found[1]) if found else -1.0


@pytest.fixture
def fleet(cluster: Cluster) -> Iterator[Fleet]:
    yield cluster.fleet(SERVERS, *FAST)


def prompt(seed: int, blocks: int = 20) -> list[int]:
    return [seed * 100_000 + token for token in range(blocks * BLOCK + 3)]


@pytest.fixture
def replaying(cluster: Cluster, fleet: Fleet) -> Iterator[World]:
    world = World(cluster, fleet, replay=True)
    yield world
    world.close()


def test_requests_go_where_the_prompt_is_held_and_move_with_it(replaying: World) -> None:
    world = replaying
    hashes = {seed: world.hold(seed % SERVERS, prompt(seed)) for seed in range(6)}
    assert eventually(world.all_precise), world.picker.page()
    assert eventually(lambda: [world.held(rank) for rank in range(SERVERS)] == [40, 40, 40])
    assert [world.target(prompt(seed)) for seed in range(6)] == [seed % SERVERS for seed in range(6)]
    world.drop(0, hashes[0])
    world.hold(1, prompt(0))
    assert eventually(lambda: (world.held(0), world.held(1)) == (20, 60))
    assert [world.target(prompt(0)) for _ in range(3)] == [1, 1, 1]


def test_a_restarted_picker_knows_by_replay_what_is_held(replaying: World) -> None:
    world = replaying
    for seed in range(6):
        world.hold(seed % SERVERS, prompt(seed))
    again = world.cluster.picker(Path("unused"), workers=1, config_text=world.config_text)
    assert eventually(lambda: world.all_precise(again))
    assert [world.held(rank, again) for rank in range(SERVERS)] == [40, 40, 40]


def test_lost_messages_are_replayed_and_garbage_is_counted(replaying: World) -> None:
    world = replaying
    for rank in range(SERVERS):
        world.hold(rank, prompt(rank))
    assert eventually(world.all_precise)
    publisher = world.publishers[0]
    hashes = list(blocks_of(prompt(7), BLOCK))
    publisher.publish([publisher.dialect.stored(hashes, None, prompt(7)[: len(hashes) * BLOCK], BLOCK)], lost=True)
    publisher.publish_bytes(b"\xc1 garbage")
    publisher.send_frames([publisher.topic, b"1"])
    assert eventually(lambda: world.held(0) == 40)
    assert eventually(lambda: world.precise()["sim-rank-0"])
    assert world.target(prompt(7)) == 0
    assert eventually(lambda: world.picker.counter("kv_cache_events_malformed_total") >= 2)
    assert eventually(lambda: world.picker.counter("kv_cache_events_gaps_total") >= 1)


def hostile_payloads() -> Iterator[tuple[int, bytes]]:
    """Yields numbers and payloads of messages that no engine sends."""
    encode = msgspec.msgpack.encode
    yield (1 << 64) - 1, encode([1.0, [["AllBlocksCleared"]]])
    yield 1 << 63, encode([1.0, [["AllBlocksCleared"]]])
    events: list[list[object]] = [
        [["BlockStored", [1], None, ["x" * 1_000_000, *["a"] * 2000], 16]],
        [None] * 1_000_000,
        [["AllBlocksCleared"]] * 100_000,
        [["BlockStored", [n], None, [1] * 16, 16, None, "GPU", None, None, 1 << n] for n in range(60)],
        [["BlockStored", [n + 1], n, [1], 1] for n in range(60_000)],
        [["BlockRemoved", [1] * 2_000_000]],
    ]
    yield from ((number, encode([1.0, each])) for number, each in enumerate(events))


def own_core(process: int) -> None:
    """Lets a process take a core whatever else runs, if this machine permits that: nice values count only within a session."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(process, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))


def test_a_server_with_hostile_events_costs_only_its_own_precision(replaying: World) -> None:
    world = replaying
    for rank in range(SERVERS):
        world.hold(rank, prompt(rank))
    assert eventually(world.all_precise)
    before = child_pid(world.picker, "kv-events")
    own_core(before)  # on a starved CPU, it would hang for longer than the parent waits
    malformed = world.picker.counter("kv_cache_events_malformed_total")
    for number, payload in hostile_payloads():
        world.publishers[0].send_frames([world.publishers[0].topic, number.to_bytes(8, "big"), payload])
    assert eventually(lambda: world.picker.counter("kv_cache_events_malformed_total") >= malformed + 6, 90.0)
    world.hold(1, prompt(11))
    assert eventually(lambda: world.held(1) == 40)
    assert eventually(lambda: world.precise()["sim-rank-1"] and world.precise()["sim-rank-2"])
    assert [world.target(prompt(number)) for number in (1, 2, 11)] == [1, 2, 1]
    assert child_pid(world.picker, "kv-events") == before
    assert eventually(lambda: '"kv-events: an endpoint sends malformed events' in world.picker.child.text())
    assert '"child ended"' not in world.picker.child.text()


def test_a_server_whose_event_port_does_not_exist_is_named_and_costs_no_other(cluster: Cluster, fleet: Fleet) -> None:
    names = ["sim-rank-0", "sim-rank-9999"]
    listed = [{"name": name, "address": host, "port": number} for name, (host, number) in zip(names, fleet.addresses, strict=False)]
    file = cluster.directory / "ranks.yaml"
    file.write_text(yaml.safe_dump({"endpoints": listed}))
    text = CONFIG.format(endpoints=file, port=65535 - 100, speculates="false", replay="")
    picker = cluster.picker(Path("unused"), workers=1, config_text=text)
    assert eventually(lambda: "port 75434 is above 65535" in picker.child.text())
    assert '"child ended"' not in picker.child.text()


def test_what_was_just_sent_is_expected_there(cluster: Cluster, fleet: Fleet) -> None:
    world = World(cluster, fleet, replay=True, speculates=True)
    try:
        for rank in range(SERVERS):
            world.hold(rank, prompt(90 + rank))
        assert eventually(world.all_precise)
        first = world.target(prompt(50))
        assert [world.target(prompt(50)) for _ in range(8)] == [first] * 8
    finally:
        world.close()


def test_without_a_replay_socket_a_followed_stream_is_precise_from_its_first_message(cluster: Cluster, fleet: Fleet) -> None:
    world = World(cluster, fleet, replay=False)
    try:
        assert eventually(lambda: world.picker.counter("kv_cache_events_active_subscribers") == SERVERS)
        for rank in range(SERVERS):
            world.hold(rank, prompt(rank))
        assert eventually(world.all_precise)
        assert [world.target(prompt(rank)) for rank in range(SERVERS)] == [0, 1, 2]
        world.publishers[0].publish([world.publishers[0].dialect.cleared()], lost=True)
        world.hold(0, prompt(8))
        assert eventually(lambda: not world.precise()["sim-rank-0"])  # a gap that nobody can fill
        assert world.precise()["sim-rank-1"]
    finally:
        world.close()


def test_servers_may_connect_to_the_picker_and_name_themselves_in_the_topic(cluster: Cluster, fleet: Fleet) -> None:
    port = free_row(1)
    listed = [{"name": f"sim-{rank}", "address": host, "port": port} for rank, (host, port) in enumerate(fleet.addresses)]
    file = cluster.directory / "bound.yaml"
    file.write_text(yaml.safe_dump({"endpoints": listed}))
    text = CONFIG.format(endpoints=file, port=5557, speculates="false", replay="")
    text = text.replace("discoverPods: true", f'zmqEndpoint: "tcp://127.0.0.1:{port}"')
    picker = cluster.picker(Path("unused"), workers=1, config_text=text)
    gateway = cluster.envoy(picker)
    context: zmq.Context = zmq.Context()
    topics = [f"kv@{host}:{number}@m" for host, number in fleet.addresses]
    publishers = [KvPublisher(context, f"tcp://127.0.0.1:{port}", connect=True, topic=topic) for topic in topics]
    try:
        assert eventually(lambda: _announce(picker, publishers))
        bodies = [json.dumps({"model": MODEL, "prompt": prompt(rank), "max_tokens": 1}).encode() for rank in range(SERVERS)]
        expected = [f"sim-{rank}" for rank in range(SERVERS)]
        assert eventually(lambda: [ask(gateway, COMPLETIONS, body).server for body in bodies] == expected)
    finally:
        for publisher in publishers:
            publisher.close()
        context.term()


def _announce(picker: Picker, publishers: Sequence[KvPublisher]) -> bool:
    """Publishes once more which blocks every server holds, as its first message. Returns whether the picker has got all of them."""
    for rank, publisher in enumerate(publishers):
        hashes = list(blocks_of(prompt(rank), BLOCK))
        publisher.next = 0
        publisher.publish([publisher.dialect.stored(hashes, None, prompt(rank)[: len(hashes) * BLOCK], BLOCK)])
    return len(re.findall(r"^llm_d_epp_kv_cache_events_precise{.*} 1", picker.page(), re.MULTILINE)) == SERVERS
