"""`epp doctor --kv-events` reads events of an endpoint, or says what is wrong with it."""

import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner, Result

from loadtest.demo.ports import free_ports
from loadtest.sim.kv_publisher import KvPublisher, blocks_of
from workers.cli import main
from workers.cli.kv_diagnosis import ExpectedEvents, Heard

HOST = "127.0.0.1"
TOKENS = list(range(64))


class Server:
    """An endpoint that publishes again and again what it holds."""

    def __init__(self, *, topic: str = "kv@pod@model", kept: int = 0, live: bool = True) -> None:
        self.port, self.replay_port = free_ports(2)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = f"tcp://{HOST}:"
        self._publisher = KvPublisher(self._context, f"{address}{self.port}", f"{address}{self.replay_port}", topic=topic)
        self._live = live
        for _ in range(kept):
            self._publish()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _publish(self) -> None:
        hashes = list(blocks_of(TOKENS, 16))
        self._publisher.publish([self._publisher.dialect.stored(hashes, None, TOKENS, 16)])

    def _run(self) -> None:
        while not self._stopped.wait(0.01):
            if self._live:
                self._publish()
            self._publisher.answer_replays()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._publisher.close()
        self._context.term()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        server.close()


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", "--kv-events", *arguments])


def test_ten_events_are_shown(servers: list[Server]) -> None:
    servers.append(Server())
    result = doctor(f"{HOST}:{servers[0].port}", "--block-size=16", "--model=model")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == f"connected to tcp://{HOST}:{servers[0].port}"
    assert sum("holds 4 blocks of 16 tokens in gpu" in line for line in lines) >= 10
    assert lines[-1].endswith("blocks of 16 tokens")


def test_what_a_server_has_kept_counts_while_it_is_idle(servers: list[Server]) -> None:
    servers.append(Server(kept=12, live=False))
    result = doctor(f"{HOST}:{servers[0].port}", f"--replay-port={servers[0].replay_port}")
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"replay from {HOST}:{servers[0].replay_port}: 12 messages, numbers 0 to 11" in result.stdout


def test_a_configuration_names_ports_topic_block_size_and_model(servers: list[Server], tmp_path: Path) -> None:
    servers.append(Server())
    file = tmp_path / "config.yaml"
    file.write_text(
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
        '- {type: token-producer, parameters: {modelName: other, vllm: {url: "http://render:8000"}}}\n'
        "- type: precise-prefix-cache-producer\n  parameters:\n    tokenProcessorConfig: {blockSizeTokens: 64}\n"
        f"    kvEventsConfig: {{podDiscoveryConfig: {{socketPort: {servers[0].port}}}}}\n"
        "- {type: prefix-cache-scorer}\n"
        "schedulingProfiles: [{name: default, plugins: [{pluginRef: prefix-cache-scorer}]}]\n"
    )
    result = doctor(HOST, "-c", str(file))
    assert result.exit_code == 1
    assert "problem: other block size: its blocks have 16 tokens, and blockSizeTokens is 64" in result.stderr
    assert "problem: other model: its topic names 'model', and token-producer has modelName 'other'" in result.stderr


def test_another_topic_is_named(servers: list[Server]) -> None:
    servers.append(Server(topic="events"))
    result = doctor(f"{HOST}:{servers[0].port}")
    assert result.exit_code == 1
    assert "problem: other topic: its topics are 'events', and topicFilter is 'kv@'" in result.stderr


def test_a_server_without_events_is_told_from_one_that_refuses(servers: list[Server]) -> None:
    servers.append(Server(live=False))
    silent = doctor(f"{HOST}:{servers[0].port}", "--timeout=100ms")
    assert silent.exit_code == 1
    assert "problem: no events in 0.1 s; send the server a new prompt meanwhile" in silent.stderr
    (port,) = free_ports(1)
    refused = doctor(f"{HOST}:{port}")
    assert refused.exit_code == 1
    assert f"problem: refused: nothing listens on the event port {HOST}:{port}" in refused.stderr
    without_replay = doctor(f"{HOST}:{servers[0].port}", f"--replay-port={port}")
    assert without_replay.exit_code == 1
    assert f"refused: nothing listens on the replay port {HOST}:{port}" in without_replay.stderr


def test_another_service_on_the_port_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.cli.kv_probe.HANDSHAKE_S", 0.2)
    with socket.create_server((HOST, 0)) as other:
        result = doctor(f"{HOST}:{other.getsockname()[1]}")
    assert result.exit_code == 1
    assert "accepts connections but does not speak ZeroMQ" in result.stderr


@pytest.mark.parametrize("address", ["", "host:", "host:70000", "[::1]:x", ":5557"])
def test_an_address_must_be_one(address: str) -> None:
    result = doctor(address)
    assert result.exit_code == 2
    assert "write HOST or HOST:PORT" in result.stderr


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([(b"kv@a@m", -1, b"")], "a message has not the three frames topic, number and payload (1 times)"),
        ([(b"kv@a@m", 1, b"\xc1")], "a payload is not msgpack"),
        ([(b"kv@a@m", 1, b"\x92\x01\x91\xc0")], "an event is not one of vLLM or SGLang (1 times)"),
        ([(b"kv@a@m", 1, b"\x92\x01\x90")], "its messages have no events"),
    ],
)
def test_messages_that_are_no_events_are_problems(messages: Sequence[tuple[bytes, int, bytes]], problem: str) -> None:
    heard = Heard(ExpectedEvents(topic="kv@"))
    for message in messages:
        assert heard.take(*message) == []
    assert any(problem in found for found in heard.problems())
