"""Makes KV events as engines write them: in the dialects of vLLM and SGLang, as arrays or as maps. Does no I/O.

`Dialect` makes single events. `events_of` makes the events of one request from the changes of a simulated KV cache.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from loadtest.sim.engine import Job
from loadtest.sim.kv_pool import BYTES_PER_TOKEN, Change, Dropped, Gained, Offloaded

DIALECTS: Final = ("vllm", "vllm-map", "sglang", "sglang-map")
SGLANG_TIERS: Final = {"CPU": "CPU_PINNED"}

_encode = msgspec.msgpack.Encoder().encode


class Dialect:
    """Makes the events of one engine. `name`: one of DIALECTS."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._maps = name.endswith("map")
        self._sglang = name.startswith("sglang")

    def stored(
        self,
        hashes: Sequence[int | bytes],
        parent: int | bytes | None,
        tokens: Sequence[int],
        block_size: int,
        *,
        medium: str | None = "GPU",
        adapter: str | None = None,
        extra_keys: Sequence[Any] | None = None,
        cache_salt: str | None = None,
    ) -> Any:
        """Returns the event that says that these blocks are stored now. `parent`: hash of the block before these; None if there is none."""
        if self.name == "sglang":
            metadata = {"cache_salt": cache_salt} if cache_salt else None
            return ["BlockStored", list(hashes), parent, list(tokens), block_size, None, self._tier(medium), metadata]
        fields: dict[str, Any] = {
            "block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": list(tokens), "block_size": block_size,
            "lora_id": None, "medium": self._tier(medium), "lora_name": adapter,
        }  # fmt: skip
        if self._sglang:
            return {"type": "BlockStored", **fields, "cache_salt": cache_salt}
        keys = extra_keys
        if keys is None and cache_salt and parent is None:
            keys = [[cache_salt], *[None] * (len(hashes) - 1)]
        fields |= {"extra_keys": keys, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
        return {"type": "BlockStored", **fields} if self._maps else ["BlockStored", *fields.values()]

    def removed(self, hashes: Sequence[int | bytes], *, medium: str | None = "GPU") -> Any:
        """Returns the event that says that the engine no longer holds these blocks."""
        tier = self._tier(medium)
        if self._maps:
            return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": tier}
        return ["BlockRemoved", list(hashes), tier, *([0] if self.name == "vllm" else [])]

    def cleared(self) -> Any:
        """Returns the event that says that the engine no longer holds any block."""
        return {"type": "AllBlocksCleared"} if self._maps else ["AllBlocksCleared"]

    def _tier(self, medium: str | None) -> str | None:
        return SGLANG_TIERS.get(medium, medium) if self._sglang and medium else medium


def payload(events: Sequence[Any], timestamp: float = 1.0) -> bytes:
    """Encodes the payload of one message with these events."""
    return _encode([timestamp, list(events), 0])


def events_of(dialect: Dialect, job: Job, changes: Sequence[Change], block_size: int) -> list[Any]:
    """Returns the events of a request, in the order of the changes. Successive changes that drop blocks from one tier become one event."""
    events: list[Any] = []
    leaving: list[int] = []
    tier = ""
    for change in changes:
        if leaving and not (isinstance(change, Dropped) and change.tier == tier):
            events.append(dialect.removed(leaving, medium=tier))
            leaving = []
        match change:
            case Gained(first, last):
                events.append(_kept(dialect, job, first, last, block_size))
            case Offloaded(block):
                events.append(dialect.stored([block], None, [], block_size, medium="CPU"))
            case Dropped(block, tier):
                leaving.append(block)
    if leaving:
        events.append(dialect.removed(leaving, medium=tier))
    return events


def tokens_of(prompt: bytes) -> list[int]:
    """Returns the token ids of a prompt: each four bytes are one id. If the last token has fewer bytes, zeros fill it up."""
    whole = prompt + bytes(-len(prompt) % BYTES_PER_TOKEN)
    ids: list[int] = np.frombuffer(whole or bytes(BYTES_PER_TOKEN), dtype="<u4").tolist()
    return ids


def _kept(dialect: Dialect, job: Job, first: int, last: int, block_size: int) -> Any:
    size = block_size * BYTES_PER_TOKEN
    return dialect.stored(
        job.hashes[first:last],
        job.hashes[first - 1] if first else None,
        tokens_of(job.prompt[first * size : last * size]),
        block_size,
        adapter=job.lora,
        cache_salt=job.salt or None,
    )
