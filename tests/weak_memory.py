"""Carries out loads and stores in every order that the Arm memory model allows, and lets real code judge what it would have read.

    Memory      records the loads, stores and fences of code that runs on it, in program order
    outcomes    returns the values that a reader's loads can have while writers store, in any allowed order
    judged      runs the reader's code again on such values

The Arm model (Arm Architecture Reference Manual, B2.3) is multi-copy atomic: a store becomes visible to all other processes at once. So
an execution is an interleaving in which each process may take its accesses out of program order. Two accesses of one process keep their
order if both have the same address, or if a fence stands between them. The model here ignores dependencies between accesses, so it allows
at least what a CPU does. A writer's own loads do not count: nobody else stores what it reads.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tests.interleave import Grid

STATES_MAX = 3_000_000


class Access(NamedTuple):
    """Is a load (`value` None), a store, or a fence (`address` None) of one 8-byte word."""

    address: int | None
    value: int | None


FENCE = Access(None, None)


class AnotherPath(Exception):
    """Ends a replay whose code takes another path than the recorded one, because it has read other values."""


class Words:
    """8-byte words. `load` and `store` are called for each access to one of them."""

    def __init__(self, load: Callable[[int], int], store: Callable[[int, int], None], size: int, first: int = 0) -> None:
        self.load, self.store, self.size, self.first = load, store, size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return array("Q", [self[i] for i in range(*at.indices(self.size))])
        return self.load(self.first + at)

    def __setitem__(self, at: int | slice, value: Any) -> None:
        if isinstance(at, slice):
            for i, one in zip(range(*at.indices(self.size)), value, strict=True):
                self[i] = one
            return
        self.store(self.first + at, int(value))

    def toreadonly(self) -> "Words":
        return self


class Bytes:
    """The same memory as bytes. Slices begin and end with a word."""

    def __init__(self, words: Words) -> None:
        self.words = words

    def __getitem__(self, at: slice) -> memoryview:
        return memoryview(self.words[at.start // 8 : at.stop // 8]).cast("B")

    def __setitem__(self, at: slice, value: bytes) -> None:
        self.words[at.start // 8 : at.stop // 8] = memoryview(value).cast("Q")

    def toreadonly(self) -> "Bytes":
        return self


class Memory:
    """Replaces a `Region`. `cells`: the values of its words. Keeps the accesses in `accesses`, or replays `script`."""

    def __init__(self, cells: Sequence[int]) -> None:
        self.cells = array("Q", cells)
        self.accesses: list[Access] = []
        self.script: list[tuple[int, int]] | None = None
        self.words = Words(self._load, self._store, len(cells))
        self.bytes = Bytes(self.words)

    def _load(self, address: int) -> int:
        if self.script is None:
            self.accesses.append(Access(address, None))
            return self.cells[address]
        if not self.script or self.script[0][0] != address:
            raise AnotherPath
        return self.script.pop(0)[1]

    def _store(self, address: int, value: int) -> None:
        self.accesses.append(Access(address, value))
        self.cells[address] = value

    def fence(self) -> None:
        self.accesses.append(FENCE)

    def array(self, dtype: Any, offset_bytes: int, shape: tuple[int, int]) -> Any:
        return Grid(self.words, offset_bytes // 8, *shape)

    def part(self, offset_bytes: int, size: int) -> "Memory":
        part = Memory(())
        part.words = Words(self._load, self._store, size // 8, offset_bytes // 8)
        part.bytes = Bytes(part.words)
        return part


def stores(accesses: Sequence[Access]) -> list[Access]:
    """The stores and fences among the accesses of a writer."""
    return [access for access in accesses if access == FENCE or access.value is not None]


def _must_precede(program: Sequence[Access]) -> tuple[list[Access], list[int]]:
    """The accesses without fences, and for each a mask of the earlier ones that must take effect before it."""
    accesses: list[Access] = []
    masks: list[int] = []
    fenced = 0  # the accesses before the last fence
    for access in program:
        if access == FENCE:
            fenced = (1 << len(accesses)) - 1
            continue
        same = sum(1 << i for i, other in enumerate(accesses) if other.address == access.address)
        masks.append(fenced | same)
        accesses.append(access)
    return accesses, masks


def outcomes(cells: Sequence[int], programs: Sequence[Sequence[Access]]) -> set[tuple[int, ...]]:
    """Returns the values that all loads, in program order, can have together. At most one of the programs loads.

    `cells`: the memory before. `programs`: the accesses of each process.
    """
    changing = {a.address for program in programs for a in program if a.value is not None and a.value != cells[a.address]}
    kept = [[a for a in program if a == FENCE or a.address in changing] for program in programs]
    loads = [a.address for program in programs for a in program if a != FENCE and a.value is None]
    found = _explore(cells, [_must_precede(program) for program in kept], sorted(changing))
    every = set()
    for values in found:
        read = iter(values)
        every.add(tuple(next(read) if address in changing else cells[address] for address in loads))
    return every


def _explore(cells: Sequence[int], programs: list[tuple[list[Access], list[int]]], addresses: list[int]) -> set[tuple[int, ...]]:
    """Visits every state that the programs can reach. Returns the values of their loads."""
    place = {address: i for i, address in enumerate(addresses)}
    loads = sum(access.value is None for accesses, _ in programs for access in accesses)
    start = ((0,) * len(programs), tuple(cells[address] for address in addresses), (None,) * loads)
    seen, left, found = {start}, [start], set()

    def next_states(state: tuple) -> Iterator[tuple]:
        done, memory, loaded = state
        for number, (accesses, masks) in enumerate(programs):
            load = -1
            for i, (address, value) in enumerate(accesses):
                load += value is None
                if done[number] >> i & 1 or masks[i] & ~done[number]:
                    continue
                after = (*done[:number], done[number] | 1 << i, *done[number + 1 :])
                at = place[address]
                if value is None:
                    yield after, memory, (*loaded[:load], memory[at], *loaded[load + 1 :])
                else:
                    yield after, (*memory[:at], value, *memory[at + 1 :]), loaded

    while left:
        state = left.pop()
        if None not in state[2]:
            found.add(state[2])
            continue
        for following in next_states(state):
            if following not in seen:
                seen.add(following)
                left.append(following)
        assert len(seen) < STATES_MAX, "this test is too large: use fewer words"
    return found


def judged(
    memory: Memory, reader: Sequence[Access], found: set[tuple[int, ...]], code: Callable[[], Any]
) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Runs `code` on `memory` once per outcome of the loads of `reader`. Yields outcome and result; None: the code took another path."""
    addresses = [access.address for access in reader if access != FENCE]
    for values in sorted(found):
        memory.script = list(zip(addresses, values, strict=True))
        try:
            yield values, code()
        except AnotherPath:
            yield values, None
        finally:
            memory.script = None
