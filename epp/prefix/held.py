"""Computes the keys of held blocks, both from the events of model servers and from requests.

    event    tokens, adapter, extra keys  ─┐
                                           ├─▶ one key per whole block ─▶ the index of held blocks
    request  tokens, model, media, salt   ─┘

A key is one hash of a chain (`epp.prefix.blocks`) over the token ids of the blocks. The engine's own hashes only connect events to each
other, so engine and picker need not agree on a hash. The picker cuts a prompt into blocks of the engine's size, and the size is part of
every key, so keys of different block sizes never match. Extra keys (hashes of media, the cache salt of the first block) are part of the
content of their block, in any order. The root of a chain stands for the LoRA adapter. The base model has the adapter name "", whatever name
requests use for the base model.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from epp.prefix.blocks import MEDIA_MAX, NARROW, Hashes, links
from epp.request import Feature

TOKEN_BYTES: Final = 4
BASE_MODEL: Final = ""
BLOCK_TOKENS_MAX: Final = 1 << 16
NAME_BYTES_MAX: Final = 128  # bytes of an extra key; enough, because engines use hashes and short salts
NAMES_CACHED: Final = 64

Extras = Mapping[int, Sequence[str]]  # block -> its extra keys
NO_EXTRAS: Final[Extras] = {}

_NARROW = np.uint64(NARROW)


def held_root(adapter: str, block_tokens: int, secret: int) -> int:
    """Returns the start of the chain of an adapter's blocks of `block_tokens` tokens. `secret`: 64 bits."""
    name = adapter.encode("utf-8", "surrogatepass")
    return xxh3_64_intdigest(b"held:%d:%d:%b" % (block_tokens, len(name), name), secret)


def adapter_word(adapter: str, secret: int) -> int:
    """Returns a hash of the name of an adapter: 64 bits, never 0."""
    return xxh3_64_intdigest(b"adapter:" + adapter.encode("utf-8", "surrogatepass"), secret) or 1


def held_links(tokens: NDArray[np.uint32], block_tokens: int, start: int, secret: int, extras: Extras = NO_EXTRAS) -> Hashes:
    """Returns the chain over the whole blocks of `tokens`: uint64, shape (len(tokens) // block_tokens,).

    `start`: the root, or the hash of the block before. `extras`: block number, from 0 -> its extra keys. Extra keys beyond the last whole
    block are ignored.
    """
    count = len(tokens) // block_tokens
    words = np.ascontiguousarray(tokens[: count * block_tokens], dtype="<u4")
    blocks: list[bytes] = words.view(f"V{block_tokens * TOKEN_BYTES}").tolist() if count else []
    known: dict[tuple[str, ...], bytes] = {}  # cache of encoded extra keys, because a medium overlaps many blocks
    for block, names in extras.items():
        if names and 0 <= block < count:
            key = tuple(names)
            more = known.get(key)
            if more is None:
                more = known[key] = _extra_bytes(names)
            blocks[block] += more
    return links(blocks, start, secret)


def index_keys(chain: Hashes) -> Hashes:
    """Returns the keys under which the index of held blocks has these blocks: their hashes without the bit WIDE (`epp.prefix.blocks`)."""
    return chain & _NARROW


def request_extras(features: Sequence[Feature], cache_salt: str, block_tokens: int, blocks: int) -> Extras:
    """Returns the extra keys of a prompt's first `blocks` blocks.

    Each medium is an extra key of the blocks that its placeholder overlaps; the salt is an extra key of block 0.

    Clients send offsets and lengths, so these may be any numbers. To bound the work, only the first MEDIA_MAX media are used. The function
    also stops when the media overlap more blocks in total than is possible for media that do not overlap each other.
    """
    if not features and not cache_salt:
        return NO_EXTRAS
    extras: dict[int, list[str]] = {}
    room = blocks + MEDIA_MAX
    for feature in features[:MEDIA_MAX]:
        first = feature.offset // block_tokens
        stop = min(-(-(feature.offset + feature.length) // block_tokens), blocks)
        if not feature.hash or feature.length <= 0 or first >= stop:
            continue
        room -= stop - first
        if room < 0:
            break
        for block in range(first, stop):
            extras.setdefault(block, []).append(feature.hash)
    if cache_salt:
        extras.setdefault(0, []).append(cache_salt)
    return extras


def _extra_bytes(names: Sequence[str]) -> bytes:
    encoded = sorted(map(_name_bytes, names))
    return b"".join(b"%d:%b" % (len(name), name) for name in encoded)


@lru_cache(NAMES_CACHED)
def _name_bytes(name: str) -> bytes:
    """Encodes a name. A long name becomes a byte that no name contains, and a hash.

    The encoding must be short, because one name may be a key of every block of a prompt.
    """
    encoded = name.encode("utf-8", "surrogatepass")
    return encoded if len(encoded) <= NAME_BYTES_MAX else b"\xff%b" % xxh3_128_digest(encoded)
