"""Memory order: the only place that says what the shared structures rely on.

Python has no fences. What the structures need is that

1. an aligned 8-byte store is seen whole or not at all;
2. stores of one process become visible in program order (seqlock: mark, body, mark);
3. loads of one process happen in program order (seqlock: version, body, version).

x86-64 gives all three (total store order; CPython and NumPy copy 8-byte aligned words in units
of at least 8 bytes, which the hammer test in `tests/shm/hammer.py` watches over).

aarch64 gives 1 only. There the structures *detect* instead of *prevent*: the last word of a table
row is the XOR of its other words, a document carries a CRC, and an index entry is one word, so it
needs no order at all. An XOR misses a torn row when the torn words cancel out; that this is rare
is arithmetic, not a measurement. Nothing here has been run on aarch64.

What this module does not do: order anything. It refuses machines on which the layouts would be
wrong, and says in words what the machine it runs on is good for.
"""

import platform
import struct
import sys

TOTAL_STORE_ORDER = frozenset({"x86_64", "AMD64"})
ATOMIC_WORDS_ONLY = frozenset({"aarch64", "arm64"})


def refuse_machine(byteorder: str, pointer_bytes: int) -> str | None:
    """Why shared layouts cannot work on such a machine, or None when they can."""
    if byteorder != "little":
        return f"shared layouts are little-endian, this machine is {byteorder}-endian"
    if pointer_bytes != 8:
        return f"aligned 8-byte stores need a 64-bit machine, this one has {pointer_bytes * 8} bits"
    return None


def promise(machine: str | None = None) -> str:
    """One line on what a reader of shared rows may expect on this machine."""
    machine = platform.machine() if machine is None else machine
    if machine in TOTAL_STORE_ORDER:
        return f"{machine}: stores and loads keep their order; torn rows are seen by their version"
    if machine in ATOMIC_WORDS_ONLY:
        return f"{machine}: order is not kept; torn rows are detected by XOR and CRC (untested)"
    return f"{machine}: unknown memory order; torn rows are detected by XOR and CRC (untested)"


def check_machine() -> None:
    """Refuse to be imported where the layouts would be wrong."""
    refusal = refuse_machine(sys.byteorder, struct.calcsize("P"))
    if refusal is not None:
        raise ImportError(refusal)
