"""Targets for input from publishers of KV events and from other replicas: what they send is decoded and applied to real shared memory."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from epp.prefix.kv_events import BLOCKS_MAX, EVENTS_MAX, Cleared, MalformedBatch, Stored, decode
from shm.held_blocks import HeldWriter, schemas
from shm.segment import Region
from tests.fuzz.target import Target
from tests.workers.replicas.live import HASHES, Replica
from tests.workers.replicas.messages import blocks, rows_of
from workers.replicas.wire import BUDGET, FORM, REQUESTS_MAX, Band, Flow, Message, PageRows, PoolFlow, encode, endpoint_key, page_row
from workers.supervisor.kv_events.holdings import Holder, Holdings

RECORDED = Path(__file__).parents[1] / "workers" / "supervisor" / "kv_events" / "recorded"
RECORDED_BYTES = 4096
_raws = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


def array(items: Sequence[bytes]) -> bytes:
    """Encodes an array of encoded values."""
    return b"\xdd" + len(items).to_bytes(4, "big") + b"".join(items)


def elements(data: bytes) -> list[bytes]:
    """Cuts an array into its encoded values. Returns the data in one piece if they are no array."""
    try:
        return [bytes(raw) for raw in _raws(data)]
    except (msgspec.MsgspecError, RecursionError):
        return [data]


# KV events.


@cache
def _holdings() -> Holdings:
    index, links = schemas(1 << 10)
    memory, linked = (Region(memoryview(bytearray(schema.bytes))) for schema in (index, links))
    return Holdings(HeldWriter(index, memory, links, linked), (("gpu", 1000), ("cpu", 800)), 5)


def kv_events(data: bytes) -> None:
    """Decodes a payload, and applies it to the blocks of an endpoint. Clearing them leaves nothing behind."""
    try:
        batch = decode(data)
    except MalformedBatch:
        batch = None
    if batch is not None:
        assert len(batch.events) + batch.malformed <= EVENTS_MAX
        assert batch.rank is None or type(batch.rank) is int
        named = [each for event in batch.events if not isinstance(event, Cleared) for each in event.hashes]
        assert len(named) <= BLOCKS_MAX and all(0 <= each < 1 << 64 for each in named)
        tokens = [event.tokens for event in batch.events if isinstance(event, Stored) and event.tokens is not None]
        assert all(each.dtype == np.uint32 for each in tokens)
    holder = Holder(_holdings())
    holder.apply(data)
    _holdings().flush(1)
    holder.clear()
    assert holder.held == 0
    holder.leave()


def kv_seeds() -> Mapping[str, bytes]:
    tokens = list(range(64))
    stored = [
        "BlockStored",
        [1, 2, b"\x01" * 32, -4],
        None,
        tokens,
        16,
        None,
        "GPU",
        None,
        [["a"], None, [["b", 3]], []],
        0,
        "full_attention",
    ]
    mapped = {
        "type": "BlockStored",
        "block_hashes": [5],
        "parent_block_hash": 2,
        "token_ids": tokens[:16],
        "block_size": 16,
        "lora_name": "l",
    }
    sglang = {**mapped, "lora_name": {"cache_salt": "s"}, "token_ids": [[n, n + 1] for n in range(16)], "parent_block_hash": None}
    removed, cleared = ["BlockRemoved", [1, 5], "CPU_PINNED", 0], ["AllBlocksCleared"]
    pack = msgspec.msgpack.encode
    recorded = {path.name: each for path in RECORDED.iterdir() for each in _payloads(path)[:1]}
    return {
        "arrays": pack([1.0, [stored, removed, cleared, stored], 3]),
        "maps": pack({"ts": 1.0, "events": [mapped, sglang, {"type": "BlockRemoved", "block_hashes": [5]}], "data_parallel_rank": 1}),
        "tiers": pack([1.0, [stored, ["BlockStored", [1, 2], None, [], 0, None, "CPU"]]]),
        "surrogate": pack([1.0, [removed]])[:-1] + b"\xa3\xed\xa0\xbd",
    } | recorded


def _payloads(path: Path) -> list[bytes]:
    """Returns the shorter payloads of a recording of an engine."""
    found: list[bytes] = []
    values = [msgspec.msgpack.decode(path.read_bytes())]
    while values:
        value = values.pop()
        if isinstance(value, bytes) and len(value) <= RECORDED_BYTES:
            found.append(value)
        elif isinstance(value, list | dict):
            values += value.values() if isinstance(value, dict) else value
    return found


def kv_parts(data: bytes) -> list[bytes]:
    """The time stamp, each event, the rank."""
    fields = elements(data)
    return [fields[0], *elements(fields[1]), *fields[2:3]] if len(fields) > 1 else fields


def kv_whole(parts: Sequence[bytes]) -> bytes:
    return array([parts[0], array(parts[1:-1]), parts[-1]]) if len(parts) > 1 else b"".join(parts)


KV_EVENTS = Target(
    "kv_events",
    kv_events,
    kv_seeds,
    kv_parts,
    kv_whole,
    words=(
        b"\xabBlockStored",
        b"\xacBlockRemoved",
        b"\xb0AllBlocksCleared",
        b"\xa4type",
        b"\xdd\xff\xff\xff\xff",
        b"\xc0",
        b"\xcf" + b"\xff" * 8,
    ),
    modules=("epp.prefix.kv_events", "workers.supervisor.kv_events.holdings", "shm.held_blocks"),
    allowance=8 << 20,  # after many runs, all ids of owners are swept at once
)


# Messages of replicas.

X, Y = "10.0.0.1:8000", "10.0.0.2:8000"


def replicas(data: bytes) -> None:
    """Hears a message, also as a part of a copy, and applies it. What workers then see of others is possible."""
    replica = Replica("redis://127.0.0.1:6379/0", "a", {X: 0, Y: 1})
    exchange = replica.exchange
    exchange.notices.appeared = lambda *_: None  # type: ignore[method-assign,misc]  # it writes to the log
    for copy in (False, True):
        exchange._heard(data, copy=copy)
    exchange._apply(1.0)
    assert all(0 <= int(each) <= REQUESTS_MAX for each in replica.remote.requests)
    assert len(exchange.others.live) <= 1
    assert replica.index._size <= replica.index._entries.size


def replica_seeds() -> Mapping[str, bytes]:
    key = endpoint_key(f"d/{X}")
    loads, flow = rows_of({key: (3, 300), 7: (1, 0)}), Flow([Band(0, 2, 20), Band(-5, 1, 1)], 9)
    told = blocks((key, HASHES[:4].tolist()), (9, [1, 2]))
    rows = page_row(2).pack(key, 1000, 1, 3, 1.0, 0.5)
    budget = BUDGET.pack(77, 100.0, 1.0, 2, 3.0, 4.0)
    return {
        "loads": encode(Message(FORM, "b", 1, 7, 1, True, 1, loads, flow)),
        "taught": encode(Message(FORM, "b", 1, 7, 1, False, 1, b"", None, told, told, True)),
        "pages": encode(Message(FORM, "b", 1, 7, 1, False, 1, pages=PageRows(1, 2, rows * 2), budgets=budget * 2)),
        "pools": encode(Message(FORM, "b" * 40, 1, 7, 1, True, 2, flows=[PoolFlow(0, flow), PoolFlow(5, flow)])),
        "own": encode(Message(FORM, "a", 1 << 50, 7, 1, True, 1, loads)),
    }


REPLICAS = Target(
    "replicas",
    replicas,
    replica_seeds,
    elements,
    array,
    words=(b"\xc0", b"\xc3", b"\x02", b"\xa1b", b"\xcf" + b"\xff" * 8, b"\xcf\x7f" + b"\xff" * 7, b"\xc4\x10", b"\xdd\xff\xff\xff\xff"),
    modules=("workers.replicas.reading", "workers.replicas.others", "workers.replicas.exchange", "workers.replicas.joining"),
    allowance=4 << 20,  # the replica
    share=0.2,
)
