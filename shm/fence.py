"""Memory order: states what the shared structures require of the CPU.

Python has no fences. The structures require that

1. another process sees an aligned 8-byte store whole or not at all;
2. stores of one process become visible in program order (seqlock: mark, body, mark);
3. loads of one process happen in program order (seqlock: version, body, version).

x86-64 guarantees all three: it has total store order, and CPython and NumPy copy 8-byte aligned
words in units of at least 8 bytes. `tests/shm/hammer.py` checks how CPython and NumPy copy.

aarch64 guarantees only the first. There the structures *detect* a torn read instead of *preventing*
it: the last word of a table row is the XOR of its other words, and a document carries a CRC. An
index entry is a single word and needs no order. An XOR misses a torn row if the torn words cancel
out; arithmetic says that this is rare, no measurement does. Nothing here was run on aarch64.

This module orders no memory accesses. It rejects machines on which the layouts would be wrong, and
describes what readers may rely on.
"""

import platform
import struct
import sys

TOTAL_STORE_ORDER = frozenset({"x86_64", "AMD64"})
ATOMIC_WORDS_ONLY = frozenset({"aarch64", "arm64"})


def refuse_machine(byteorder: str, pointer_bytes: int) -> str | None:
    """Return why shared layouts cannot work on a machine with this byte order and pointer size. None: the layouts work."""
    if byteorder != "little":
        return f"shared layouts are little-endian, this machine is {byteorder}-endian"
    if pointer_bytes != 8:
        return f"aligned 8-byte stores need a 64-bit machine, this one has {pointer_bytes * 8} bits"
    return None


def promise(machine: str | None = None) -> str:
    """Return a line that says how readers on this machine (default: the current one) avoid torn rows."""
    machine = platform.machine() if machine is None else machine
    if machine in TOTAL_STORE_ORDER:
        return f"{machine}: stores and loads keep their order; readers detect torn rows by their version"
    if machine in ATOMIC_WORDS_ONLY:
        return f"{machine}: the CPU does not keep the order; readers detect torn rows by XOR and CRC (untested)"
    return f"{machine}: unknown memory order; readers detect torn rows by XOR and CRC (untested)"


def check_machine() -> None:
    """Raise ImportError on a machine where the layouts would be wrong."""
    refusal = refuse_machine(sys.byteorder, struct.calcsize("P"))
    if refusal is not None:
        raise ImportError(refusal)
