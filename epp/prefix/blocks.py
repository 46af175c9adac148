"""Cuts prompt bytes into blocks and computes their chained hashes.

Block i gets a keyed 64-bit hash h_i (XXH3 with a secret seed). The chain is c_i = c_{i-1} * P + h_i mod 2^64, with P odd and
c_{-1} = the root. So c_i stands for blocks 0..i: a hit on c_i proves all blocks before it. The recurrence has the closed form
c_i = P^(i+1) * (root + sum over j <= i of h_j * P^-(j+1)), which NumPy computes in one pass for many `links`. Both ways give
the same numbers. The last block may be shorter than the others.

The hashes from block DENSE_BLOCKS on have the bit `WIDE`. Of these, the index keeps only every STRIDE-th (`landmarks`). Code that counts
the blocks of an endpoint counts each such hash as STRIDE blocks.

In token ids, all placeholders of a medium have the same id, whatever the medium shows. `with_media` replaces them by words of the
medium's hash.

The root is a hash of model and cache salt, each prefixed by its length, under the secret of the deployment. So prompts of different
models or salts share no hash, and without the secret no client can produce the hashes of another client's blocks.

A cache salt also changes the seed of the block hashes (`seed`). If it changed only the root, the hashes of a text under two salts would
differ by a number that does not depend on the text. A client that fills the index sees which of its blocks other prompts displace. From one
known prompt of a client with another salt it could learn that number, and then recognize all prompts of that client.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_digest, xxh3_64_intdigest, xxh3_128_digest

from compiled import calls
from epp.request import Feature

Hashes = NDArray[np.uint64]

MASK: Final = (1 << 64) - 1
P: Final = 0x9E3779B97F4A7C15
P_INVERSE: Final = pow(P, -1, 1 << 64)
DENSE_BLOCKS: Final = 64
STRIDE: Final = 4
XXH3_SHORT_MAX: Final = 240  # bytes; the C kernel hashes only longer blocks
VECTOR_FROM_BLOCKS: Final = 36  # for fewer blocks, the plain loop is faster
MEDIA_MAX: Final = 4096  # media of one prompt that are used; later media are ignored
WIDE: Final = 1 << 16
NARROW: Final = MASK ^ WIDE


class _Powers:
    """Caches powers P^1.. and P^-1.., extended on demand. The longest accepted body bounds their number."""

    def __init__(self) -> None:
        self.up: Hashes = np.empty(0, np.uint64)
        self.down: Hashes = np.empty(0, np.uint64)

    def reach(self, count: int) -> None:
        size = max(1024, 1 << (count - 1).bit_length())
        self.up = np.multiply.accumulate(np.full(size, P, np.uint64))
        self.down = np.multiply.accumulate(np.full(size, P_INVERSE, np.uint64))


_powers: Final = _Powers()


def root(model: str, cache_salt: str, secret: int) -> int:
    """Returns the start of the chain for a model and a cache salt. `secret`: 64 bits."""
    name = model.encode()
    return xxh3_64_intdigest(b"%d:%b%d:%b" % (len(name), name, len(cache_salt), cache_salt.encode()), secret)


def seed(cache_salt: str, secret: int) -> int:
    """Returns the seed of the block hashes of prompts with this cache salt. Without a salt, the seed is the secret itself."""
    return xxh3_64_intdigest(b"salt:%b" % cache_salt.encode(), secret) if cache_salt else secret


def block_hashes(prompt: bytes, block_bytes: int, start: int, secret: int) -> Hashes:
    """Returns the chain: uint64 of shape (ceil(len(prompt) / block_bytes),). `start` is the root, `secret` the seed of block hashes."""
    if calls.chain is not None and block_bytes > XXH3_SHORT_MAX:
        rest = len(prompt) % block_bytes
        tail = xxh3_64_intdigest(prompt[len(prompt) - rest :], secret) if rest else 0
        return calls.chain(prompt, block_bytes, start, secret, tail)
    return reference_hashes(prompt, block_bytes, start, secret)


def reference_hashes(prompt: bytes, block_bytes: int, start: int, secret: int) -> Hashes:
    """Computes `block_hashes` in Python, without the C kernel."""
    chain: list[int] = []
    link = start
    for at in range(0, len(prompt), block_bytes):
        link = (link * P + xxh3_64_intdigest(prompt[at : at + block_bytes], secret)) & MASK
        chain.append(link & NARROW if len(chain) < DENSE_BLOCKS else link | WIDE)
    return np.array(chain, dtype=np.uint64)


def links(blocks: list[bytes], start: int, secret: int) -> Hashes:
    """Returns the chain over these blocks: uint64, one hash per block. In these hashes, the bit `WIDE` has no meaning.

    `start`: the root, or the hash of the block before the first. A chain that is continued from one of its hashes is the same as a chain
    that is computed at once.
    """
    if len(blocks) >= VECTOR_FROM_BLOCKS:
        return _chained(blocks, start, secret)
    chain = []
    link = start
    for block in blocks:
        link = (link * P + xxh3_64_intdigest(block, secret)) & MASK
        chain.append(link)
    return np.array(chain, dtype=np.uint64)


def _chained(blocks: list[bytes], start: int, secret: int) -> Hashes:
    count = len(blocks)
    if count > len(_powers.up):
        _powers.reach(count)
    digests = b"".join(map(xxh3_64_digest, blocks, repeat(secret)))
    terms = np.frombuffer(digests, dtype=">u8").astype(np.uint64)
    terms *= _powers.down[:count]
    np.cumsum(terms, out=terms)
    terms += np.uint64(start)
    terms *= _powers.up[:count]
    return terms


def with_media(ids: NDArray[np.uint32], features: Sequence[Feature]) -> NDArray[np.uint32]:
    """Replaces placeholders in token ids by words of the media's hashes.

    Stops after MEDIA_MAX media, or when overlapping media are together longer than the prompt, so that the work stays bounded.
    """
    replaced = ids.copy()
    room = len(replaced)
    for feature in features[:MEDIA_MAX]:
        span = replaced[feature.offset : feature.offset + feature.length]
        room -= len(span)
        if room < 0:
            break
        if len(span) and feature.hash:
            content = f"{feature.modality}:{feature.hash}".encode("utf-8", "surrogatepass")
            span[:] = np.resize(np.frombuffer(xxh3_128_digest(content), "<u4"), len(span))
    return replaced


def landmarks(chain: Hashes, start: int = 0) -> Hashes:
    """Returns the hashes from `start` on that the index keeps: the first DENSE_BLOCKS hashes, then every STRIDE-th, and the last.

    A hit on a block proves that all blocks before it are there, too. So a match of DENSE_BLOCKS or more loses at most STRIDE - 1 blocks,
    and a prompt of 400 KB needs a quarter of the entries.
    """
    if len(chain) <= DENSE_BLOCKS + 1 or start >= len(chain):
        return chain[start:]
    kept = [chain[start:DENSE_BLOCKS], chain[max(DENSE_BLOCKS, -(-start // STRIDE) * STRIDE) :: STRIDE]]
    if (len(chain) - 1 - DENSE_BLOCKS) % STRIDE:
        kept.append(chain[-1:])
    return np.concatenate(kept)
