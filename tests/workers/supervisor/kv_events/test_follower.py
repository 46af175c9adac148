"""The kv-events process as a whole, without its loop: which endpoints it follows, and what it keeps of those that have gone."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import zmq
from structlog.testing import capture_logs

from epp.prefix.held import adapter_word
from epp.prefix.streams import OTHER_TOPIC, PARTLY_REUSED
from loadtest.demo.ports import free_ports
from loadtest.sim.kv_publisher import KvPublisher
from shm.documents import DocumentWriter
from tests.e2e.cluster import eventually
from tests.workers.instances import made
from tests.workers.supervisor.kv_events.test_holdings import BLOCK, TOKENS, stored
from workers.process.kv_memory import KvCounts
from workers.shared.documents import ENDPOINTS, EndpointRecord, encode
from workers.supervisor.kv_events.held_state import KEEP_S
from workers.supervisor.kv_events.main import Follower
from workers.supervisor.kv_events.sockets import FRAME_BYTES_MAX

CONFIG = """
plugins:
- {type: token-producer, parameters: {modelName: m, vllm: {url: "http://127.0.0.1:9"}}}
- {type: precise-prefix-cache-producer, parameters: {kvEventsConfig: {podDiscoveryConfig: {socketPort: 9}}}}
- {type: prefix-cache-scorer}
schedulingProfiles:
- {name: default, plugins: [{pluginRef: prefix-cache-scorer}]}
"""
MESSAGE = msgspec.msgpack.encode([1.0, [stored(range(1, 11), None, TOKENS)]])


def server(slot: int, uid: str = "u") -> EndpointRecord:
    return EndpointRecord("default", f"server-{slot}", "127.0.0.1", 8000 + slot, {}, slot, 1, 10 + slot, uid)


@contextlib.contextmanager
def life(folder: Path, endpoints: Sequence[EndpointRecord], now: float) -> Iterator[Follower]:
    """A picker's process, from the time at which it learns of these endpoints to its end."""
    with made(folder / "run", CONFIG, state_dir=str(folder / "state"), kv_index_blocks=4096) as instance:
        DocumentWriter(instance.layout.documents, instance.memory.documents).write(ENDPOINTS, encode(endpoints))
        follower = Follower(instance)
        follower.follow(now)
        yield follower
        follower.close()


def heard(follower: Follower, now: float) -> None:
    """Every endpoint sends its first message."""
    for followed in follower.followed.values():
        followed.stream.opened(now)
        followed.take(0, MESSAGE, now)


def held(follower: Follower) -> dict[str, int]:
    follower.holdings.flush(1)
    return {followed.endpoint.name: followed.holder.held for followed in follower.followed.values()}


def test_a_restarted_picker_goes_on_with_each_stream_where_it_was(tmp_path: Path) -> None:
    with life(tmp_path, [server(0), server(1)], 1.0) as first:
        heard(first, 1.0)
        assert held(first) == {"server-0": 10, "server-1": 10}
    with life(tmp_path, [server(1), server(2)], 5.0) as second:
        assert held(second) == {"server-1": 10, "server-2": 0}
        known = {followed.endpoint.name: followed for followed in second.followed.values()}
        assert known["server-1"].record(5.0).why  # nothing is believed before its stream goes on
        known["server-1"].stream.opened(5.0)
        assert known["server-1"].record(5.0).why
        known["server-1"].take(1, msgspec.msgpack.encode([1.0, [["BlockRemoved", [10]]]]), 5.0)
        assert known["server-1"].record(5.0).why == ""
        assert held(second)["server-1"] == 9


def test_a_server_whose_numbers_do_not_go_on_holds_nothing_of_the_snapshot(tmp_path: Path) -> None:
    with life(tmp_path, [server(0)], 1.0) as first:
        heard(first, 1.0)
    with life(tmp_path, [server(0)], 5.0) as second:
        (followed,) = second.followed.values()
        followed.stream.opened(5.0)
        followed.take(7, msgspec.msgpack.encode([1.0, [stored([77], None, TOKENS[:BLOCK])]]), 5.0)
        assert held(second) == {"server-0": 1}


def test_a_server_with_another_uid_is_another_server(tmp_path: Path) -> None:
    with life(tmp_path, [server(0)], 1.0) as first:
        heard(first, 1.0)
    with life(tmp_path, [server(0, uid="another")], 5.0) as second:
        assert held(second) == {"server-0": 0}


def test_an_endpoint_that_does_not_come_back_is_dropped_after_a_while(tmp_path: Path) -> None:
    with life(tmp_path, [server(0), server(1)], 1.0) as first:
        heard(first, 1.0)
    with life(tmp_path, [server(1)], 5.0) as second:
        owners = set(second.holdings.writer.owners())
        second.follow(5.0 + KEEP_S - 1.0)
        assert set(second.holdings.writer.owners()) == owners
        second.follow(5.0 + KEEP_S + 1.0)
        left = set(second.holdings.writer.owners())
        assert len(left) == len(owners) // 2
        assert held(second) == {"server-1": 10}
    with life(tmp_path, [server(0)], 9.0) as third:
        assert held(third) == {"server-0": 0}


def test_an_endpoint_that_comes_back_late_is_still_known(tmp_path: Path) -> None:
    with life(tmp_path, [server(0), server(1)], 1.0) as first:
        heard(first, 1.0)
    with life(tmp_path, [server(1)], 5.0):
        pass  # its snapshot keeps the other one, too
    with life(tmp_path, [server(0), server(1)], 9.0) as third:
        assert held(third) == {"server-0": 10, "server-1": 10}


def test_the_model_that_a_topic_names_has_no_effect(tmp_path: Path) -> None:
    """It need not be the one that is served: who sends a message follows from the connection, or from the address in the topic."""
    (port,) = free_ports(1)
    address = f"tcp://127.0.0.1:{port}"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    text = CONFIG.replace("podDiscoveryConfig: {socketPort: 9}", f'zmqEndpoint: "{address}"')
    with made(tmp_path / "run", text, kv_index_blocks=4096) as instance:
        DocumentWriter(instance.layout.documents, instance.memory.documents).write(ENDPOINTS, encode([server(0)]))
        follower = Follower(instance)
        publisher = KvPublisher(context, address, connect=True, topic="kv@127.0.0.1:8000@another-model")

        def heard_of() -> bool:
            publisher.next = 0
            publisher.publish_bytes(MESSAGE)
            follower.turn(time.monotonic())
            return held(follower) == {"server-0": 10}

        assert eventually(heard_of)
        publisher.close()
        follower.close()
    context.term()


@pytest.mark.parametrize(("topic", "why"), [("", ""), ("kv@a@m", ""), ("events", OTHER_TOPIC)])
def test_messages_count_without_a_topic_and_with_one_that_the_filter_lets_through(tmp_path: Path, topic: str, why: str) -> None:
    """vLLM sends messages without a topic unless it is told to use one."""
    (port,) = free_ports(1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with made(tmp_path / "run", CONFIG.replace("9}", f"{port}}}"), kv_index_blocks=4096) as instance:
        DocumentWriter(instance.layout.documents, instance.memory.documents).write(ENDPOINTS, encode([server(0)]))
        publisher = KvPublisher(context, f"tcp://127.0.0.1:{port}", topic=topic)
        with contextlib.closing(Follower(instance)) as follower, capture_logs() as logs:

            def read() -> bool:
                publisher.next = 0
                publisher.publish_bytes(MESSAGE)
                follower.turn(time.monotonic())
                followed = next(iter(follower.followed.values()))
                return followed.messages > 0 and followed.record(time.monotonic()).why == why

            assert eventually(read)
            assert held(follower) == {"server-0": 0 if why else 10}
            (followed,) = follower.followed.values()
            assert (followed.counts().dropped == followed.messages) == bool(why)
            assert eventually(lambda: follower.turn(time.monotonic()) or bool(why) == ("'topic': 'events'" in str(logs)))
        publisher.close()
    context.term()


def test_a_model_with_a_window_of_attention_has_a_remark(tmp_path: Path) -> None:
    with life(tmp_path, [server(0)], 1.0) as follower:
        (followed,) = follower.followed.values()
        followed.stream.opened(1.0)
        groups = [
            stored(range(1, 11), None, TOKENS, BLOCK, None, "GPU", None, None, group, kind)
            for group, kind in enumerate(("full_attention", "sliding_window"))
        ]
        followed.take(0, msgspec.msgpack.encode([1.0, groups[:1]]), 1.0)
        assert (followed.record(1.0).why, followed.record(1.0).remark) == ("", "")
        followed.take(1, msgspec.msgpack.encode([1.0, groups[1:]]), 1.0)
        assert (followed.record(1.0).why, followed.record(1.0).remark) == ("", PARTLY_REUSED)
    with life(tmp_path, [server(0)], 5.0) as successor:
        (followed,) = successor.followed.values()
        assert followed.record(5.0).remark == PARTLY_REUSED


def test_a_successor_of_the_process_knows_the_adapters_that_events_have_named(tmp_path: Path) -> None:
    named = msgspec.msgpack.encode([1.0, [stored([1], None, TOKENS[:BLOCK], BLOCK, 1, "GPU", "sql")]])
    with made(tmp_path / "run", CONFIG, kv_index_blocks=4096) as instance:
        DocumentWriter(instance.layout.documents, instance.memory.documents).write(ENDPOINTS, encode([server(0)]))
        first = Follower(instance)
        first.follow(1.0)
        (followed,) = first.followed.values()
        followed.stream.opened(1.0)
        followed.take(0, named, 1.0)
        first.publishing.publish([followed], first.holdings, KvCounts(), 1.0)
        second = Follower(instance)
        assert second.holdings.known_words == {adapter_word("sql", instance.credentials.prefix_seed)}
        for each in (first, second):
            each.close()


def test_a_publisher_of_a_message_above_the_limit_is_followed_again_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.supervisor.kv_events.costs.REPORT_S", 0.1)
    monkeypatch.setattr("workers.supervisor.kv_events.followed.AGAIN_S", 0.1)
    (port,) = free_ports(1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = KvPublisher(context, f"tcp://127.0.0.1:{port}")
    with made(tmp_path / "run", CONFIG.replace("socketPort: 9", f"socketPort: {port}"), kv_index_blocks=4096) as instance:
        DocumentWriter(instance.layout.documents, instance.memory.documents).write(ENDPOINTS, encode([server(0)]))
        follower = Follower(instance)

        def heard_of() -> bool:
            publisher.next = 0
            publisher.publish_bytes(MESSAGE)
            follower.turn(time.monotonic())
            return held(follower) == {"server-0": 10}

        assert eventually(heard_of)
        with capture_logs() as logs:
            publisher.publish_bytes(bytes(FRAME_BYTES_MAX + 1))
            assert eventually(lambda: follower.turn(time.monotonic()) or any("longer" in line["event"] for line in logs))
        (line,) = (line for line in logs if "longer" in line["event"])
        assert (line["endpoint"], line["count"]) == ("server-0", 1)
        for each in follower.followed.values():
            each.holder.clear()
        assert eventually(heard_of)
        assert [each.counts().malformed for each in follower.followed.values()] == [1]
        follower.close()
        publisher.close()
    context.term()
