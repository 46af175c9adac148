"""Prompt bytes -> chained block hashes.

Block i gets a keyed 64-bit hash h_i (XXH3 with a secret seed), and the chain is c_i = c_{i-1} * P + h_i mod 2^64 with P odd and
c_{-1} = the root, so c_i stands for blocks 0..i: a hit on c_i proves all blocks before it. The recurrence has the closed form
c_i = P^(i+1) * (root + sum over j <= i of h_j * P^-(j+1)), which NumPy computes in one pass for long prompts; both ways give
the same numbers. The last block may be shorter than the others.

One bit of a hash says how its block is remembered: `WIDE` is set from block DENSE_BLOCKS on, where `landmarks` keeps every STRIDE-th,
so that whoever counts what an endpoint holds knows that such a hash stands for STRIDE blocks.

Where a medium's placeholders stand among token ids, they are all the same id, whatever the picture: there the words of its hash stand
instead (`with_media`).

The root is a hash of model and cache salt, each with its length in front, under the deployment's secret: prompts of different
models or salts share nothing, and nobody without the secret can aim at another's blocks.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_digest, xxh3_64_intdigest, xxh3_128_digest

from epp.request import Feature

Hashes = NDArray[np.uint64]

MASK: Final = (1 << 64) - 1
P: Final = 0x9E3779B97F4A7C15
P_INVERSE: Final = pow(P, -1, 1 << 64)
DENSE_BLOCKS: Final = 64
STRIDE: Final = 4
VECTOR_FROM_BLOCKS: Final = 36  # below this the plain loop is faster
MEDIA_MAX: Final = 4096  # of a prompt
WIDE: Final = 1 << 16
NARROW: Final = MASK ^ WIDE

assert VECTOR_FROM_BLOCKS <= DENSE_BLOCKS


class _Powers:
    """P^1.. and P^-1.., grown on demand; bounded by the longest body that is accepted."""

    def __init__(self) -> None:
        self.up: Hashes = np.empty(0, np.uint64)
        self.down: Hashes = np.empty(0, np.uint64)

    def reach(self, count: int) -> None:
        size = max(1024, 1 << (count - 1).bit_length())
        self.up = np.multiply.accumulate(np.full(size, P, np.uint64))
        self.down = np.multiply.accumulate(np.full(size, P_INVERSE, np.uint64))


_powers = _Powers()


def root(model: str, cache_salt: str, secret: int) -> int:
    """Where the chain of a model and a salt starts. `secret`: 64 bits."""
    name = model.encode()
    return xxh3_64_intdigest(b"%d:%b%d:%b" % (len(name), name, len(cache_salt), cache_salt.encode()), secret)


def block_hashes(prompt: bytes, block_bytes: int, start: int, secret: int) -> Hashes:
    """uint64 of shape (ceil(len(prompt) / block_bytes),); `start` is the chain's root."""
    count = -(-len(prompt) // block_bytes)
    if count >= VECTOR_FROM_BLOCKS:
        return _vector(prompt, block_bytes, start, secret, count)
    chain = []
    link = start
    for at in range(0, len(prompt), block_bytes):
        link = (link * P + xxh3_64_intdigest(prompt[at : at + block_bytes], secret)) & MASK
        chain.append(link & NARROW)
    return np.array(chain, dtype=np.uint64)


def _vector(prompt: bytes, block_bytes: int, start: int, secret: int, count: int) -> Hashes:
    if count > len(_powers.up):
        _powers.reach(count)
    digests = b"".join(map(xxh3_64_digest, _cut(prompt, block_bytes), repeat(secret)))
    terms = np.frombuffer(digests, dtype=">u8").astype(np.uint64)
    terms *= _powers.down[:count]
    np.cumsum(terms, out=terms)
    terms += np.uint64(start)
    terms *= _powers.up[:count]
    terms[:DENSE_BLOCKS] &= np.uint64(NARROW)
    terms[DENSE_BLOCKS:] |= np.uint64(WIDE)
    return terms


def _cut(prompt: bytes, block_bytes: int) -> list[bytes]:
    """A prompt's blocks: by NumPy, with the hashing `map` above, a third less than slice by slice (400 KB: 134 us, not 206)."""
    whole = len(prompt) // block_bytes
    pieces: list[bytes] = np.frombuffer(prompt, f"V{block_bytes}", whole).tolist()
    if whole * block_bytes < len(prompt):
        pieces.append(prompt[whole * block_bytes :])
    return pieces


def with_media(ids: NDArray[np.uint32], features: Sequence[Feature]) -> NDArray[np.uint32]:
    """Token ids as they are to be hashed. What lies beyond the prompt, or upon another medium, is not worth its time."""
    made = ids.copy()
    room = len(made)
    for feature in features[:MEDIA_MAX]:
        place = made[feature.offset : feature.offset + feature.length]
        room -= len(place)
        if room < 0:
            break
        if len(place) and feature.hash:
            content = f"{feature.modality}:{feature.hash}".encode("utf-8", "surrogatepass")
            place[:] = np.resize(np.frombuffer(xxh3_128_digest(content), "<u4"), len(place))
    return made


def landmarks(chain: Hashes, start: int = 0) -> Hashes:
    """The blocks from `start` on that an index needs to know: of the first DENSE_BLOCKS each, of the others every STRIDE-th, and the last.

    A hit on a block proves all before it, so this loses at most STRIDE - 1 blocks of a match that is DENSE_BLOCKS long or more,
    and a prompt of 400 KB costs a quarter of the entries.
    """
    if len(chain) <= DENSE_BLOCKS + 1 or start >= len(chain):
        return chain[start:]
    kept = [chain[start:DENSE_BLOCKS], chain[max(DENSE_BLOCKS, -(-start // STRIDE) * STRIDE) :: STRIDE]]
    if (len(chain) - 1 - DENSE_BLOCKS) % STRIDE:
        kept.append(chain[-1:])
    return np.concatenate(kept)
