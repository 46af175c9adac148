"""Decodes the KV events that vLLM, SGLang and their simulators publish. This is pure code: bytes in, events out.

    message   topic | sequence: 8 bytes, big-endian | payload: msgpack
    payload   [timestamp, [event, …], rank?] or a map {ts, events, data_parallel_rank}
    event     [tag, field, …] with trailing fields that may be missing, or a map with `type`; one payload may have both

Source: `vllm/distributed/kv_events.py` and `sglang/srt/disaggregation/kv_events.py`, and events recorded from them. A hash is an integer
of any width, or bytes; only the last 8 bytes are used. SGLang with EAGLE has pairs in the place of token ids, (t0, t1), (t1, t2), …: the
first id of each pair is used. A malformed or unknown event, even an event that is not valid msgpack, is skipped and counted as malformed;
the other events of the payload are used.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from epp.prefix.held import BLOCK_TOKENS_MAX

GPU: Final = "gpu"
TIER_NAMES: Final[Mapping[str, str]] = {"cpu_pinned": "cpu"}  # engine's name of a tier -> our name
FULL_ATTENTION: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
PAYLOAD_BYTES_MAX: Final = 8 << 20
EVENTS_MAX: Final = 1 << 16  # events of one payload; an event takes up to 30 us to apply
BLOCKS_MAX: Final = 1 << 16  # blocks that the events of one payload name
CLEARED_MAX: Final = 16  # `Cleared` events of one payload; one would suffice, because only events after the last one have an effect
GROUP_MAX: Final = 63
NAME_CHARS_MAX: Final = 1024
EXTRAS_MAX: Final = 4096  # extra keys of one block
SEQUENCE_BYTES: Final = 8
REPLAY_END: Final = b"\xff" * SEQUENCE_BYTES
SEQUENCE_MAX: Final = (1 << 63) - 1

_HASH_MASK: Final = (1 << 64) - 1
_STORED_FIELDS: Final = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind",
)  # fmt: skip
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx")

Tokens = NDArray[np.uint32]


class Stored(NamedTuple):
    """Says that the endpoint holds these blocks from now on.

    `hashes`: the engine's hashes of the blocks, in order. `parent`: the engine's hash of the block before the first one; None for the first
    block of a prompt. `tokens`: the token ids of all blocks; None if the blocks are known, and are now held in this `tier`, too.
    `block_tokens`: tokens per block; 0 if not given. `adapter`: the name of the LoRA adapter; "" for the base model, or if not given.
    `adapter_id`: the engine's own id of the adapter; None for the base model, or if not given. `extras`: extra keys per block; empty
    without extra keys. `group`: the group of KV caches; None if the engine has no groups. `kind`: the group's kind of attention; "" if not
    given.
    """

    hashes: Sequence[int]
    parent: int | None
    tokens: Tokens | None
    block_tokens: int
    adapter: str
    adapter_id: int | str | None
    tier: str
    extras: Sequence[Sequence[str]]
    group: int | None
    kind: str


class Removed(NamedTuple):
    """Says that the endpoint does not hold these blocks in this tier any more."""

    hashes: Sequence[int]
    tier: str
    group: int | None


class Cleared(NamedTuple):
    """Says that the endpoint holds no blocks any more, in any tier."""


Event = Stored | Removed | Cleared


class Batch(NamedTuple):
    """Holds the events of one message. `malformed`: how many events were skipped. `rank`: the data-parallel rank; None if not given."""

    events: Sequence[Event]
    malformed: int
    rank: int | None


class MalformedBatch(Exception):
    """Says that the payload is no batch of events. The text says why."""


class _Malformed(Exception):
    """Says that one event does not follow the protocol."""


_decode = msgspec.msgpack.Decoder().decode
_decode_fields = msgspec.msgpack.Decoder(list[msgspec.Raw] | dict[str, msgspec.Raw]).decode
_decode_items = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError, TypeError)


def sequence_of(frame: bytes) -> int | None:
    """Returns the sequence number that a frame has; None if the frame has another length, or a number that no publisher can reach."""
    number = int.from_bytes(frame, "big")
    return number if len(frame) == SEQUENCE_BYTES and number <= SEQUENCE_MAX else None


def is_read(topic: bytes, beginning: bytes) -> bool:
    """Returns whether messages of a topic are read. Messages without a topic are read: vLLM gives no topic by default."""
    return not topic or topic.startswith(beginning)


def topic_parts(topic: bytes) -> tuple[str, str]:
    """Returns pod and model of a topic `kv@pod@model`; empty if the topic does not name them."""
    prefix, _, rest = topic.decode("utf-8", "replace").partition("@")
    pod, _, model = rest.partition("@")
    return (pod[:NAME_CHARS_MAX], model[:NAME_CHARS_MAX]) if prefix else ("", "")


def decode(payload: bytes) -> Batch:
    """Returns the events of a payload. Raises MalformedBatch."""
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise MalformedBatch(f"{len(payload)} bytes are above the limit, {PAYLOAD_BYTES_MAX}")
    try:
        value = _decode(payload)
    except _UNREADABLE:
        value = _decoded_apart(payload)
    if isinstance(value, list):
        listed: Any = value[1] if len(value) > 1 else None
        rank = value[2] if len(value) > 2 else None
    elif isinstance(value, dict):
        listed = value.get("events")
        rank = value.get("data_parallel_rank", value.get("attn_dp_rank"))
    else:
        raise MalformedBatch(f"neither an array nor a map, but {type(value).__name__}")
    if not isinstance(listed, list):
        raise MalformedBatch("without a list of events")
    if len(listed) > EVENTS_MAX:
        raise MalformedBatch(f"{len(listed)} events are above the limit, {EVENTS_MAX}")
    events: list[Event] = []
    malformed = blocks = cleared = 0
    for item in listed:
        try:
            event = _event(item)
        except _Malformed:
            malformed += 1
            continue
        if isinstance(event, Cleared):
            cleared += 1
        else:
            blocks += len(event.hashes)
        if blocks > BLOCKS_MAX or cleared > CLEARED_MAX:
            raise MalformedBatch(f"it names more than {BLOCKS_MAX} blocks, or clears more than {CLEARED_MAX} times")
        events.append(event)
    return Batch(events, malformed, rank if type(rank) is int else None)


def _decoded_apart(payload: bytes) -> Any:
    """Decodes a payload event by event; None stands for each event that is not valid. Raises MalformedBatch."""
    try:
        fields = _decode_fields(payload)
        if isinstance(fields, list):
            return [_each(raw) if at == 1 else _readable(raw) for at, raw in enumerate(fields[:3])]
        return {name: _each(raw) if name == "events" else _readable(raw) for name, raw in fields.items()}
    except _UNREADABLE as problem:
        raise MalformedBatch(f"not msgpack: {problem}") from None


def _each(raw: msgspec.Raw) -> list[Any]:
    return [_readable(item) for item in _decode_items(raw)[: EVENTS_MAX + 1]]


def _readable(raw: msgspec.Raw) -> Any:
    """Decodes one value. Returns None if the value is not valid."""
    try:
        return _decode(raw)
    except _UNREADABLE:
        return None


def _event(item: Any) -> Event:
    if isinstance(item, list) and item:
        tag, values = item[0], item[1:]
        if tag == "BlockStored":
            return _stored(dict(zip(_STORED_FIELDS, values, strict=False)))
        if tag == "BlockRemoved":
            return _removed(dict(zip(_REMOVED_FIELDS, values, strict=False)))
    elif isinstance(item, dict):
        tag = item.get("type")
        if tag == "BlockStored":
            return _stored(item)
        if tag == "BlockRemoved":
            return _removed(item)
    else:
        raise _Malformed
    if tag == "AllBlocksCleared":
        return Cleared()
    raise _Malformed


def _stored(fields: Mapping[Any, Any]) -> Stored:
    hashes = _hashes(fields.get("block_hashes"))
    tokens = _tokens(fields.get("token_ids"))
    block_tokens = fields.get("block_size") or 0
    if type(block_tokens) is not int or not 0 <= block_tokens <= BLOCK_TOKENS_MAX or (tokens is not None and not block_tokens):
        raise _Malformed
    parent = fields.get("parent_block_hash")
    name: Any = fields.get("lora_name")
    salt = fields.get("cache_salt")
    if isinstance(name, dict):  # older SGLang has a map of metadata where vLLM has the adapter's name
        name, salt = None, name.get("cache_salt")
    lora_id, kind = fields.get("lora_id"), fields.get("kv_cache_spec_kind")
    if type(lora_id) not in (int, str, type(None)) or type(kind) not in (str, type(None)):
        raise _Malformed
    if isinstance(lora_id, str):
        lora_id = _name(lora_id)
    adapter = _name(name)
    first = parent in (None, 0)
    extras = _extras(fields.get("extra_keys"), adapter, len(hashes))
    if first and salt and hashes:
        extras = extras or [()] * len(hashes)
        extras = [(*extras[0], _name(salt)), *extras[1:]]
    return Stored(
        hashes, None if first else _hash(parent), tokens, block_tokens, adapter, lora_id or None, _tier(fields.get("medium")),
        extras, _group(fields.get("group_idx")), kind or "",
    )  # fmt: skip


def _removed(fields: Mapping[Any, Any]) -> Removed:
    return Removed(_hashes(fields.get("block_hashes")), _tier(fields.get("medium")), _group(fields.get("group_idx")))


def _hashes(values: Any) -> list[int]:
    if not isinstance(values, list):
        raise _Malformed
    return [_hash(value) for value in values]


def _hash(value: Any) -> int:
    if type(value) is int:
        return value & _HASH_MASK
    if type(value) is bytes and value:
        return int.from_bytes(value[-8:], "big")
    raise _Malformed


def _tokens(values: Any) -> Tokens | None:
    if values is None or values == []:
        return None
    if not isinstance(values, list):
        raise _Malformed
    if type(values[0]) is list:  # pairs; the last token is only in the second place, and no block needs it
        if not all(type(pair) is list and len(pair) == 2 for pair in values):
            raise _Malformed
        values = [pair[0] for pair in values]
    try:
        # An array converts numbers only. NumPy would convert all values to texts if one value is a long text.
        return np.frombuffer(array("I", values), np.uint32)
    except (OverflowError, TypeError):
        raise _Malformed from None


def _tier(medium: Any) -> str:
    if medium is None:
        return GPU
    name = _name(medium).lower()
    return TIER_NAMES.get(name, name)


def _name(value: Any) -> str:
    if value is None:
        return ""
    if type(value) is not str or len(value) > NAME_CHARS_MAX:
        raise _Malformed
    return value


def _group(value: Any) -> int | None:
    if value is None or (type(value) is int and 0 <= value <= GROUP_MAX):
        return value
    raise _Malformed


def _extras(values: Any, adapter: str, count: int) -> Sequence[Sequence[str]]:
    """Returns extra keys per block, without the adapter's name. An element is a string or [string, offset]; others are ignored."""
    if values is None:
        return ()
    if not isinstance(values, list):
        raise _Malformed
    extras = [_names(block, adapter) for block in values[:count]]
    if not any(extras):
        return ()
    return [*extras, *[()] * (count - len(extras))]


def _names(values: Any, adapter: str) -> Sequence[str]:
    if not isinstance(values, list):
        return ()
    heads = [value[0] if isinstance(value, list) and value else value for value in values[:EXTRAS_MAX]]
    return [head for head in heads if type(head) is str and head != adapter]
