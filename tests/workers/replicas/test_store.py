"""What a link makes of a store that lies: a server that answers each command with what the test says."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled import kernels
from compiled.kernels import reference
from tests.redis_server import RedisServer, needs_redis
from tests.waiting import turns, until
from workers.replicas import store
from workers.replicas.address import parse_address
from workers.replicas.replies import REPLY_BYTES_MAX, InvalidReply, Refusal, Replies
from workers.replicas.store import StoreError, StoreLink, StoreNames

HELLO = b"%1\r\n$5\r\nproto\r\n:3\r\n"
SUBSCRIBED = b">3\r\n$9\r\nsubscribe\r\n$1\r\nx\r\n:1\r\n"
MESSAGE = b">3\r\n$7\r\nmessage\r\n$1\r\nx\r\n$2\r\nhi\r\n"


def asked(folder: Path, use: Callable[[StoreLink], Awaitable[Any]], answer: bytes, heard: bytes = b"") -> Any:
    """Returns what `use` returns with a store that answers INCR and INCRBY with `answer`, and sends `heard` to listeners."""

    served: list[asyncio.Task[Any] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.current_task())
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while words := await command(reader):
                if words[0] == b"HELLO":
                    writer.write(HELLO)
                elif words[0] == b"SUBSCRIBE":
                    writer.write(SUBSCRIBED + (heard if words[1].endswith(b"to:a") else b""))
                else:
                    writer.write(answer)
        writer.transport.abort()

    async def test() -> Any:
        path = folder / "lies"
        server = await asyncio.start_unix_server(serve, path)
        try:
            link = await StoreLink.open(parse_address(f"unix://{path}"), StoreNames("p", cluster=False), "", "a")
            try:
                return await use(link)
            finally:
                link.close()
        finally:
            server.close()
            await asyncio.gather(*(task for task in served if task))
            await turns()  # lets the transports close

    return asyncio.run(test())


async def command(reader: asyncio.StreamReader) -> list[bytes]:
    words = []
    head = await reader.readline()
    for _ in range(int(head[1:] or 0)):
        size = int((await reader.readline())[1:])
        words.append((await reader.readexactly(size + 2))[:-2])
    return words


LIES = [
    b">3\r\n$7\r\nmessage\r\n:5\r\n$1\r\nx\r\n",
    b">3\r\n$7\r\nmessage\r\n$1\r\nx\r\n:5\r\n",
    b"*2\r\n$7\r\nmessage\r\n:5\r\n",
    b"-MOVED x\r\n",
    b"-ASK x\r\n",
    b"*4294967295\r\n$-1\r\n:x\r\n",
    b"*1\r\n" * 5000,
    b":" + b"9" * 5000 + b"\r\n",
    b">2\r\n+push\r\n+x\r\n",
    b">0\r\n",
    b"$-2\r\n",
    b"?\r\n",
    b"+" + b"x" * 200_000,
    b"$%d\r\n" % (REPLY_BYTES_MAX + 1),
    b"$9000000000\r\n",
    b"*1000000\r\n" + b":1\r\n" * 1_000_000,
]


async def failed(link: StoreLink) -> None:
    """Waits until the link fails. Raises its StoreError."""
    await until(link.check)


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: str(lie[:20]))
def test_an_answer_of_a_lying_store_is_a_store_error(tmp_path: Path, lie: bytes) -> None:
    with pytest.raises(StoreError) as broken:
        asked(tmp_path, failed, b"", heard=lie)
    assert broken.value.why == "error"
    with pytest.raises(StoreError) as broken:
        asked(tmp_path, lambda link: link.epoch(0), lie)
    assert broken.value.why == "error"


@pytest.mark.parametrize(
    "answer", [b"$1\r\n5\r\n", b":-3\r\n", b":9223372036854775807\r\n", b"$-1\r\n", b"-ERR value is not an integer\r\n"]
)
def test_an_epoch_that_is_no_number_of_the_picker_is_reported_with_its_key(tmp_path: Path, answer: bytes) -> None:
    with pytest.raises(StoreError, match="p:1:epoch in the store is not a number of this picker: delete the key"):
        asked(tmp_path, lambda link: link.epoch(0), answer)


def test_messages_are_passed_on_as_they_come_and_between_answers(tmp_path: Path) -> None:
    heard: list[tuple[str, bytes]] = []

    async def use(link: StoreLink) -> int:
        link.listen(lambda channel, data: heard.append((channel, data)))
        return await link.epoch(0)

    assert asked(tmp_path, use, MESSAGE + b":7\r\n" + MESSAGE[:12]) == 7
    assert heard == [("x", b"hi")]


@given(st.lists(st.integers(1, 40), max_size=20))
def test_answers_and_messages_are_read_however_they_are_cut(cuts: list[int]) -> None:
    sent = (MESSAGE + b":5\r\n" + SUBSCRIBED + b"-ERR no\r\n" + b"$-1\r\n_\r\n" + HELLO + MESSAGE) * 2
    read: list[Any] = []
    replies, at = Replies(), 0
    for size in [*cuts, len(sent)]:
        read += replies.feed(sent[at : at + size])
        at += size
    message = (b"x", b"hi")
    once = [message, 5, [b"subscribe", b"x", 1], Refusal("ERR no"), None, None, [b"proto", 3], message]
    assert read == once * 2


PIECES = (MESSAGE, b":5\r\n", b">3\r\n$7\r\nmessage\r\n$", b"0", b"1\r\nx", b"\r\n", b"$", b"2\r\nhi", b":", b"-", b"99999999999")


@given(st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join), st.integers(0, 20))
def test_the_kernel_reads_what_the_reference_reads(data: bytes, begin: int) -> None:
    begin = min(begin, len(data))
    assert kernels.answers(data, begin, REPLY_BYTES_MAX) == reference.answers(data, begin, REPLY_BYTES_MAX)


@given(st.binary(max_size=200))
def test_any_bytes_of_a_store_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidReply):
        list(Replies().feed(data))


def test_a_store_that_does_not_answer_or_says_nothing_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def publish(link: StoreLink) -> None:
        link.publish("x", b"")
        assert not link.settled
        await failed(link)

    monkeypatch.setattr(store, "ANSWER_S", 0.3)
    with pytest.raises(StoreError, match="does not answer") as slow:
        asked(tmp_path, publish, b"")
    assert slow.value.why == "slow"
    monkeypatch.setattr(store, "SILENCE_S", 0.1)
    with pytest.raises(StoreError, match="does not answer"):
        asked(tmp_path, failed, b"")


@needs_redis
def test_a_store_that_closes_the_connection_is_unreachable(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:

        async def test() -> None:
            link = await StoreLink.open(parse_address(server.unix_url), StoreNames("p", cluster=False), "", "a")
            server.kill()
            await failed(link)

        with pytest.raises(StoreError) as lost:
            asyncio.run(test())
        assert lost.value.why == "unreachable"
