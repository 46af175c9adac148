"""Says how much of a cached prefix a model server reuses: whole blocks of the server's block size, and never the whole prompt.

A server computes at least the last token of a prompt again, because it needs that result for the first token of the answer. So of a prompt
of N tokens, the server reuses at most floor((N - 1) / block) blocks, even if it holds all (vLLM: `max_cache_hit_length` in
`vllm/v1/core/kv_cache_manager.py`). All predictions of cached tokens follow this rule.
"""

import numpy as np

from compiled import calls
from epp.candidates import Floats, Snapshot
from epp.data import CACHE_BLOCK_SIZE


class ServerBlocks:
    """Holds the tokens per block of the servers' caches. `sizes`: float64 of the snapshot's shape (endpoints,); 1 if not known."""

    __slots__ = ("_different", "key", "sizes")

    def __init__(self, sizes: Floats) -> None:
        self.key = sizes.tobytes()
        self.sizes: Floats = np.where(sizes >= 1.0, np.floor(sizes), 1.0)
        self._different: list[int] = sorted({int(size) for size in self.sizes.tolist()})

    def reused(self, held: Floats, each: float, tokens: int) -> Floats:
        """Returns how many of a prompt's `tokens` each server reuses if it has cached the `held` leading blocks of `each` tokens."""
        return calls.reused(held, each, tokens, self.sizes)

    def most(self, held: int, tokens: int) -> float:
        """Returns how many of a prompt's `tokens` a server can reuse at most if it has cached the `held` leading tokens."""
        most = 0
        for size in self._different:
            most = max(most, _whole(held, tokens, size))
        return float(most)

    def by(self, sizes: Floats) -> "ServerBlocks":
        """Returns the blocks of servers that also reuse whole blocks of `sizes` only. The smaller of the two sizes divides the larger."""
        return ServerBlocks(np.maximum(self.sizes, sizes))


def whole(held: int, tokens: int, size: float) -> int:
    """Returns how many of a prompt's `tokens` a server with blocks of `size` tokens reuses if it has cached the `held` leading tokens.

    `size`: NaN if the block size is not known.
    """
    return _whole(held, tokens, int(size) if size >= 1.0 else 1)


def _whole(held: int, tokens: int, size: int) -> int:
    return max(min(held, tokens - 1), 0) // size * size


def server_blocks(snapshot: Snapshot) -> ServerBlocks:
    """Returns the blocks of the snapshot's servers. Snapshots share the result until a block size or the list of endpoints changes."""
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
