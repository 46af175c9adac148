"""gRPC messages that arrive in several frames: they arrive whole, and what is unfinished or kept is bounded."""

import gzip
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.workers.transport.data_frames import BIG, data_frames
from tests.workers.transport.helpers import DATA, RST, Engine, fields, frame, framed, messages, payload, word
from workers.transport.limits import MIB, Budget, Limits


@pytest.mark.parametrize("read", [1000, 16393, 65536, 1 << 20])
def test_a_long_message_over_many_frames_and_reads_arrives_whole(read):
    engine = Engine()
    engine.open()
    wire = data_frames(framed(BIG))
    for at in range(0, len(wire), read):
        engine.receive(wire[at : at + read])
    assert engine.handler.messages == [BIG]
    assert engine.connection.held == 0


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 30), min_size=1, max_size=30))
@examples(200)
def test_messages_are_found_for_any_division_into_frames(sent, sizes):
    engine = Engine()
    engine.open()
    wire = b"".join(framed(m) for m in sent)
    turn = 0
    while wire:
        size = sizes[turn % len(sizes)]
        engine.receive(frame(DATA, 0, 1, wire[:size]))
        wire = wire[size:]
        turn += 1
    engine.receive(frame(DATA, 1, 1))
    assert engine.handler.messages == sent
    assert engine.handler.count("half_closed") == 1
    assert engine.connection.held == 0


def test_unfinished_messages_count_as_held_until_the_stream_ends():
    engine = Engine()
    engine.open()
    engine.receive(data_frames(framed(BIG)[:100_005]))
    assert engine.connection.held == 100_000
    engine.receive(frame(RST, 0, 1, word(8)))
    assert engine.connection.held == 0


def test_an_announced_length_without_bytes_costs_no_memory():
    engine = Engine()
    engine.open()
    engine.receive(frame(DATA, 0, 1, framed(bytes(4 * MIB))[:5]))
    assert engine.connection.held == 0


def test_a_message_above_the_limit_ends_the_stream_before_its_bytes_are_collected():
    engine = Engine(limits=Limits(message=20_000))
    engine.open()
    answer = engine.receive(frame(DATA, 0, 1, framed(bytes(20_001))[:10]))
    assert fields(answer[0])["grpc-status"] == "8"
    assert fields(answer[0])["grpc-message"] == "message of 20001 bytes is larger than the limit of 20000"
    assert engine.handler.events == [("closed", b"")]
    assert engine.receive(data_frames(framed(bytes(20_001))[10:])) == []


def test_a_message_at_the_limit_is_taken():
    engine = Engine(limits=Limits(message=20_000))
    engine.open()
    engine.receive(data_frames(framed(bytes(20_000))))
    assert engine.handler.messages == [bytes(20_000)]


def test_a_stream_that_ends_within_a_message_fails():
    engine = Engine()
    engine.open()
    answer = engine.receive(frame(DATA, 1, 1, framed(b"abc")[:6]))
    assert fields(answer[0])["grpc-status"] == "13"
    assert engine.handler.events == [("closed", b"")]


def test_unfinished_messages_of_one_connection_are_bounded():
    engine = Engine(limits=Limits(connection_held=100_000))
    for number in (1, 3, 5):
        engine.open(number)
        engine.receive(data_frames(framed(BIG)[:40_005], number))
    assert [h.count("closed") for h in engine.handlers] == [0, 0, 1]
    assert engine.connection.held == 80_000


def test_a_budget_bounds_all_connections_together():
    budget = Budget(100_000)
    engines = [Engine(budget=budget) for _ in range(3)]
    for engine in engines:
        engine.open()
        engine.receive(data_frames(framed(BIG)[:40_005]))
    assert [e.handler.count("closed") for e in engines] == [0, 0, 1]
    for engine in engines:
        engine.connection.lost()
    assert budget.used == 0


def test_a_message_that_is_too_much_for_the_budget_does_not_count_against_its_peer():
    limits = Limits(burst=10)
    engine = Engine(limits=limits, budget=Budget(100))
    for number in range(1, 101, 2):
        engine.open(number)
        answer = engine.receive(data_frames(framed(BIG)[:40_005], number))
        assert "too many bytes of unfinished messages" in unquote(fields(answer[0])["grpc-message"])
    assert not engine.connection.closing
    assert engine.abuses == []


def test_at_the_limit_other_unfinished_messages_make_room():
    budget = Budget(100_000)
    engines = [Engine(budget=budget) for _ in range(3)]
    asked = []

    def relieve(among, excess):
        asked.append((among, excess))
        engines[0].handler.stream.end(8, "given up")

    budget.relieve = relieve
    for engine in engines:
        engine.open()
        engine.receive(data_frames(framed(BIG)[:40_005]))
    assert asked == [(None, 12_763)]  # after the second frame
    assert budget.used == 80_000
    assert engines[2].handler.stream.gathered() == 40_000


def test_at_the_limit_of_a_connection_only_its_own_unfinished_messages_make_room():
    budget = Budget(1 << 20)
    engine = Engine(limits=Limits(connection_held=100_000), budget=budget)
    asked = []

    def relieve(among, excess):
        asked.append((list(among), excess))
        engine.handlers[1].stream.end(8, "given up")

    budget.relieve = relieve
    for number in (1, 3, 5):
        engine.open(number)
        engine.receive(data_frames(framed(BIG)[:40_005], number))
    assert asked == [(engine.handlers, 12_763)]  # after the second frame
    assert engine.connection.held == 80_000


def test_a_stream_that_a_relief_ends_while_it_receives_is_left_alone():
    budget = Budget(100)
    engine = Engine(budget=budget)
    budget.relieve = lambda among, excess: engine.handler.stream.end(8, "given up")
    engine.open()
    answer = engine.receive(data_frames(framed(BIG)[:40_005]))
    assert unquote(fields(answer[0])["grpc-message"]) == "given up"
    assert (engine.handler.events, budget.used, engine.errors) == ([], 0, [])


def test_gzip_messages_are_decompressed():
    engine = Engine()
    engine.open(grpc_encoding="gzip")
    engine.receive(data_frames(framed(gzip.compress(BIG), 1)) + frame(DATA, 0, 1, framed(b"plain")))
    assert engine.handler.messages == [BIG, b"plain"]


@pytest.mark.parametrize(
    ("encoding", "message", "status"),
    [
        ("gzip", framed(gzip.compress(bytes(5 * MIB), mtime=0), 1), "8"),
        ("gzip", framed(b"not gzip at all", 1), "13"),
        ("gzip", framed(gzip.compress(b"hello", mtime=0)[:-4], 1), "13"),
        ("deflate", framed(b"x", 1), "12"),
        ("identity", framed(b"x", 1), "13"),
        (None, framed(b"x", 1), "13"),
        ("gzip", framed(b"x", 2), "13"),
    ],
)
def test_messages_that_cannot_be_decompressed_end_the_stream(encoding, message, status):
    engine = Engine()
    engine.open(grpc_encoding=encoding)
    answer = engine.receive(data_frames(message))
    assert fields(answer[0])["grpc-status"] == status
    assert engine.handler.events == [("closed", b"")]


def test_a_closed_handler_may_write_to_other_streams():
    engine = Engine()
    engine.open(1)
    engine.open(3)

    first, second = engine.handlers
    first.closed = lambda: second.stream.send(b"your turn")
    assert messages(payload(engine.receive(frame(RST, 0, 1, word(8))), 3)) == [b"your turn"]


def test_bytes_that_handlers_keep_count_for_the_connection_until_they_release_them_or_end():
    engine = Engine(limits=Limits(connection_held=100))
    for number in (1, 3, 5):
        engine.open(number)
    first, second, third = (handler.stream for handler in engine.handlers)
    assert first.hold(60) and second.hold(40)
    assert not third.hold(1)
    assert engine.connection.held == 101
    first.release()
    first.release()
    assert engine.connection.held == 41
    second.end()
    engine.receive(frame(RST, 0, 5, word(8)))
    assert engine.connection.held == 0
    assert not third.hold(1)
    assert engine.connection.held == 0
