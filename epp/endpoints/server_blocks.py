"""Says how much of a cached prefix model servers reuse: whole blocks of their own size, and never the whole prompt.

A server computes at least the last token of a prompt again, because the first token of the answer follows from it. So of a prompt of N
tokens it reuses at most floor((N - 1) / block) blocks, even if it holds all (vLLM: `max_cache_hit_length` in
`vllm/v1/core/kv_cache_manager.py`). All predictions of cached tokens follow this rule.
"""

import numpy as np

from compiled import calls
from epp.candidates import Floats, Snapshot
from epp.data import CACHE_BLOCK_SIZE


class ServerBlocks:
    """Holds the tokens per block of the servers' caches. `sizes`: float64 of the snapshot's shape (endpoints,); 1 where it is not known."""

    __slots__ = ("_different", "key", "sizes")

    def __init__(self, sizes: Floats) -> None:
        self.key = sizes.tobytes()
        self.sizes: Floats = np.where(sizes >= 1.0, np.floor(sizes), 1.0)
        self._different: list[int] = sorted({int(size) for size in self.sizes.tolist()})

    def reused(self, held: Floats, each: float, tokens: int) -> Floats:
        """Returns how many of the `tokens` of a prompt each server reuses, of `held` leading blocks of `each` tokens that it has cached."""
        return calls.reused(held, each, tokens, self.sizes)

    def most(self, held: int, tokens: int) -> float:
        """Returns the most of the `tokens` of a prompt that a server can reuse, if it has `held` leading tokens cached."""
        most = 0
        for size in self._different:
            most = max(most, _whole(held, tokens, size))
        return float(most)

    def by(self, sizes: Floats) -> "ServerBlocks":
        """Returns the blocks of servers that reuse whole blocks of `sizes`, too. The smaller one of two sizes divides the other."""
        return ServerBlocks(np.maximum(self.sizes, sizes))


def whole(held: int, tokens: int, size: float) -> int:
    """Returns how many of the `tokens` of a prompt a server with blocks of `size` tokens reuses, of `held` that it has cached.

    `size`: NaN if it is not known.
    """
    return _whole(held, tokens, int(size) if size >= 1.0 else 1)


def _whole(held: int, tokens: int, size: int) -> int:
    return max(min(held, tokens - 1), 0) // size * size


def server_blocks(snapshot: Snapshot) -> ServerBlocks:
    """Returns the blocks of the snapshot's servers. Snapshots share the object while nothing changes."""
    found = snapshot.blocks
    if isinstance(found, ServerBlocks):
        return found
    sizes = snapshot.values.get(CACHE_BLOCK_SIZE.name)
    if sizes is None:
        sizes = np.ones(len(snapshot.endpoints))
    before = snapshot.endpoint_list.blocks
    if not isinstance(before, ServerBlocks) or before.key != sizes.tobytes():
        before = snapshot.endpoint_list.blocks = ServerBlocks(sizes)
    snapshot.blocks = before
    return before
