"""The KV cache of one simulated server: a fixed number of blocks with LRU prefix caching.

A prompt is cut into blocks; the hash of a block includes its predecessor's, so equal hash means
equal prefix. Blocks of running requests are in use; those shared by several requests count once.
When the last user of a hashed block leaves, the block stays as *idle*: a later prompt may hit it,
and it is taken, longest idle first, when a request needs room. Within one prompt the tail goes idle
before the head, so that a chain is evicted from its end.

Only the engine that owns the pool writes it. Invariant: in use + idle <= total. Blocks written
while decoding belong to their request alone and are not kept for reuse.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import xxhash

BYTES_PER_TOKEN = 4


def token_count(prompt: bytes) -> int:
    """Tokens of a prompt: about four bytes each, never none."""
    return max(1, -(-len(prompt) // BYTES_PER_TOKEN))


def block_hashes(prompt: bytes, block_size: int, salt: bytes) -> list[int]:
    """Chained hashes of the whole blocks of `prompt`; prompts of different salts never share."""
    size = block_size * BYTES_PER_TOKEN
    digest = xxhash.xxh3_64_intdigest
    chain = digest(salt)
    hashes = []
    for start in range(0, len(prompt) - size + 1, size):
        chain = digest(prompt[start : start + size], chain)
        hashes.append(chain)
    return hashes


class KvPool:
    """Blocks of one server: `allocate` when a request starts to run, `release` when it ends."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._users: dict[int, int] = {}
        self._private = 0
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def in_use(self) -> int:
        """Blocks that running requests hold."""
        return len(self._users) + self._private

    @property
    def idle(self) -> int:
        """Blocks that nobody holds and a later prompt may still hit."""
        return len(self._idle)

    @property
    def usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return self.in_use / self.total

    def allocate(self, hashes: Sequence[int], needed: int, hits_max: int) -> int | None:
        """Take `needed` blocks, `hashes` of them shareable; the hits, or None if too few are free.

        Leading blocks that are cached are hits, at most `hits_max`: the last token of a prompt is
        always computed.
        """
        users, idle = self._users, self._idle
        hits = from_idle = 0
        for block in hashes:
            if block in idle:
                from_idle += 1
            elif block not in users:
                break
            hits += 1
        # Behind the first miss there is hardly ever a hit; two checks in C say so for all blocks.
        known, rest, present = hashes[:hits], hashes[hits:], hits
        if not (users.keys().isdisjoint(rest) and idle.keys().isdisjoint(rest)):
            known, rest = hashes, ()
            present = sum(block in users or block in idle for block in known)
            from_idle = sum(block in idle for block in known)
        if needed - present > self.total - self.in_use - from_idle:
            return None
        self._hold(known)
        users.update(dict.fromkeys(rest, 1))
        self._private += needed - len(hashes)
        while self.in_use + len(idle) > self.total:
            idle.popitem(last=False)
        return min(hits, hits_max)

    def _hold(self, hashes: Sequence[int]) -> None:
        users, idle = self._users, self._idle
        for block in hashes:
            if block in users:
                users[block] += 1
            else:
                idle.pop(block, None)
                users[block] = 1

    def release(self, hashes: Sequence[int], needed: int) -> None:
        """Give back what `allocate` took with the same arguments."""
        users, idle = self._users, self._idle
        for block in reversed(hashes):
            if users[block] == 1:
                del users[block]
                idle[block] = None
            else:
                users[block] -= 1
        self._private -= needed - len(hashes)

    def forget(self) -> None:
        """Drop every idle block, as a restarted server has."""
        self._idle.clear()
