"""Simulates the KV cache of one server: a fixed number of blocks with LRU prefix caching.

A prompt is cut into blocks. The hash of a block includes its predecessor's hash, so equal hashes mean
equal prefixes. Running requests use blocks; a block that several requests share is counted once. When the
last user of a hashed block ends, the block becomes *idle*: a later prompt may hit it. A request that
needs room evicts idle blocks, the longest idle first. Within one prompt the last block becomes idle
first, so that a prompt's blocks are evicted from its end.

Only the engine that owns the cache writes it. Invariant: in use + idle <= total. Blocks written
while decoding belong to one request and are not kept for reuse.

The *CPU tier*, if there is one, keeps evicted blocks. If it is full, it drops the block that was
evicted or used longest ago. If it has the blocks that follow a prompt's hits, these blocks are hits, too,
and have to be loaded. `log` lists the changes of both tiers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

import xxhash

BYTES_PER_TOKEN = 4
GPU, CPU = "GPU", "CPU"


class Gained(NamedTuple):
    """A change: the GPU tier now holds the blocks `first` to `last` - 1 of the prompt."""

    first: int
    last: int


class Offloaded(NamedTuple):
    """A change: the CPU tier now holds this block."""

    block: int


class Dropped(NamedTuple):
    """A change: the tier `tier` (GPU or CPU) no longer holds this block."""

    block: int
    tier: str


Change = Gained | Offloaded | Dropped
Blocks = tuple[Sequence[int], int]  # for one request: the hashes of its prompt's whole blocks, and how many blocks it needs in all


def token_count(prompt: bytes) -> int:
    """Returns the number of tokens of a prompt: one per four bytes, rounded up, at least one."""
    return max(1, -(-len(prompt) // BYTES_PER_TOKEN))


def block_hashes(prompt: bytes, block_size: int, salt: bytes) -> list[int]:
    """Returns the chained hashes of the full blocks of `prompt`. Prompts with different salts have no hash in common."""
    size = block_size * BYTES_PER_TOKEN
    digest = xxhash.xxh3_64_intdigest
    chain = digest(salt)
    hashes = []
    for start in range(0, len(prompt) - size + 1, size):
        chain = digest(prompt[start : start + size], chain)
        hashes.append(chain)
    return hashes


class KvPool:
    """Holds the blocks of one server. The engine calls `allocate` when a request starts to run, and `release` when it ends."""

    def __init__(self, total: int, cpu_blocks: int = 0, *, logs: bool = False) -> None:
        """`cpu_blocks`: the size of the CPU tier; 0 if there is none. `logs`: whether changes are added to `log`; if not, `log` is None.

        The owner empties `log` after each call of `allocate`.
        """
        self.total = total
        self.log: list[Change] | None = [] if logs else None
        self.loaded = 0  # blocks that the last `allocate` took from the CPU tier
        self._users: dict[int, int] = {}
        self._private = 0
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._cpu_blocks = cpu_blocks
        self._cpu: OrderedDict[int, None] = OrderedDict()

    @property
    def in_use(self) -> int:
        """Returns the number of blocks that running requests hold."""
        return len(self._users) + self._private

    @property
    def idle(self) -> int:
        """Returns the number of blocks that no request holds and that a later prompt may still hit."""
        return len(self._idle)

    @property
    def usage(self) -> float:
        """Returns the share of the blocks that running requests hold, 0 to 1."""
        return self.in_use / self.total

    def blocks(self, tier: str = GPU) -> set[int]:
        """Returns the hashes of the blocks that a tier holds and that a prompt may hit."""
        return {*self._users, *self._idle} if tier == GPU else set(self._cpu)

    def hits(self, hashes: Sequence[int], coming: Container[int] = ()) -> int:
        """Returns how many leading blocks are in the GPU tier or in `coming`.

        The GPU tier holds no block longer than the blocks before it, because a prompt's blocks are evicted from its end. So bisection finds
        the number.
        """
        users, idle = self._users, self._idle
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            block = hashes[middle]
            if block in users or block in idle or block in coming:
                low = middle + 1
            else:
                high = middle
        return low

    def uncached(self, prompts: Iterable[tuple[Sequence[int], int]], block_size: int) -> list[int]:
        """Returns, for each prompt, how many tokens have to be computed if the prompts start in this order. `prompts`: (hashes, tokens).

        The blocks of earlier prompts are cached for later prompts.
        """
        coming: set[int] = set()
        uncached = []
        for hashes, tokens in prompts:
            hits = self.hits(hashes, coming)
            uncached.append(tokens - min(hits, (tokens - 1) // block_size) * block_size)
            coming.update(hashes[hits:])
        return uncached

    def room_in(self, wanted: Sequence[Blocks], held: Iterable[tuple[float, Blocks]]) -> float:
        """Returns in how many seconds all `wanted` prompts have room, in this order, if nothing else takes blocks.

        `held`: the blocks that running requests hold, and in how many seconds each request ends. A block that several of them use becomes
        free when the last one ends.
        """
        short = self.in_use - self.total
        if short + sum(needed for _, needed in wanted) <= 0:
            return 0.0
        users: dict[int, int] = {}
        for hashes, needed in wanted:
            short += needed
            for block in hashes:
                before = users.get(block, self._users.get(block, 0))
                users[block] = before + 1
                short -= before > 0
        if short <= 0:
            return 0.0
        lasts = 0.0
        for seconds, (hashes, needed) in sorted(held, key=lambda each: each[0]):
            for block in hashes:
                users[block] = left = users.get(block, self._users.get(block, 0)) - 1
                short -= left == 0
            short -= needed - len(hashes)
            lasts = seconds
            if short <= 0:
                break
        return lasts

    def allocate(self, hashes: Sequence[int], needed: int, hits_max: int) -> int | None:
        """Takes `needed` blocks for a request. Returns the number of hits, or None if too few blocks are free.

        `hashes`: one per whole block of the prompt; other requests may share these blocks. Hits are the leading blocks that are cached, but
        at most `hits_max`, because the last token of a prompt is always computed.
        """
        users, idle = self._users, self._idle
        hits = from_idle = 0
        for block in hashes:
            if block in idle:
                from_idle += 1
            elif block not in users:
                break
            hits += 1
        loaded = self._in_cpu(hashes, hits)
        # After the first uncached block, few further blocks are cached. Two set operations, which run in C, usually show that none is.
        known, rest, present = hashes[:hits], hashes[hits:], hits
        if not (users.keys().isdisjoint(rest) and idle.keys().isdisjoint(rest)):
            known, rest = hashes, ()
            present = sum(block in users or block in idle for block in known)
            from_idle = sum(block in idle for block in known)
        if needed - present > self.total - self.in_use - from_idle:
            return None
        if self.log is not None:
            self._log_new(hashes, hits)
        self._hold(known)
        users.update(dict.fromkeys(rest, 1))
        self._private += needed - len(hashes)
        while self.in_use + len(idle) > self.total:
            self._evict()
        self.loaded = max(0, min(loaded, hits_max - hits))
        return min(hits + loaded, hits_max)

    def _in_cpu(self, hashes: Sequence[int], hits: int) -> int:
        """Returns how many blocks in a row after the hits are in the CPU tier."""
        cpu, loaded = self._cpu, 0
        if cpu:
            while hits + loaded < len(hashes) and hashes[hits + loaded] in cpu:
                cpu.move_to_end(hashes[hits + loaded])
                loaded += 1
        return loaded

    def _log_new(self, hashes: Sequence[int], hits: int) -> None:
        """Logs the runs of blocks after the hits that the GPU tier does not hold yet."""
        assert self.log is not None
        users, idle, first = self._users, self._idle, hits
        for at in range(hits, len(hashes) + 1):
            if at == len(hashes) or hashes[at] in users or hashes[at] in idle:
                if first < at:
                    self.log.append(Gained(first, at))
                first = at + 1

    def _evict(self) -> None:
        """Drops the block that has been idle longest, or moves it to the CPU tier if there is one."""
        block, _ = self._idle.popitem(last=False)
        cpu, log = self._cpu, self.log
        if self._cpu_blocks:
            new = block not in cpu
            cpu[block] = None
            cpu.move_to_end(block)
            if new and log is not None:
                log.append(Offloaded(block))
        if log is not None:
            log.append(Dropped(block, GPU))
        if len(cpu) > self._cpu_blocks:
            gone, _ = cpu.popitem(last=False)
            if log is not None:
                log.append(Dropped(gone, CPU))

    def _hold(self, hashes: Sequence[int]) -> None:
        users, idle = self._users, self._idle
        for block in hashes:
            if block in users:
                users[block] += 1
            else:
                idle.pop(block, None)
                users[block] = 1

    def release(self, hashes: Sequence[int], needed: int) -> None:
        """Gives back the blocks that `allocate` took for the same arguments."""
        users, idle = self._users, self._idle
        for block in reversed(hashes):
            if users[block] == 1:
                del users[block]
                idle[block] = None
            else:
                users[block] -= 1
        self._private -= needed - len(hashes)

    def forget(self) -> None:
        """Drops all idle blocks and all blocks of the CPU tier, as a restart does."""
        self._idle.clear()
        self._cpu.clear()
