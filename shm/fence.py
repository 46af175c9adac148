"""Memory order: what the shared structures require of the CPU, and the fence that gives it to them.

1. Another process sees an aligned 8-byte store whole or not at all. x86-64 and aarch64 both guarantee this, and CPython and NumPy copy
   aligned words in units of at least 8 bytes (`tests/shm/hammer.py` checks it).
2. Stores and loads before a call of `order` take effect before stores and loads behind the call, also as other processes see them.

x86-64 shows the stores of a process in program order and carries out its loads in program order, so on x86-64 `order` does nothing. aarch64
does neither (Arm Architecture Reference Manual, B2.3), so `order` is a fence: the fence of the kernels (`dmb ish`), or without kernels a
lock that is released and acquired. The release is a store-release, so earlier accesses stay before it. The acquire is a
load-acquire, so later accesses stay behind it.

`tests/shm/test_memory_order.py` proves where a fence is needed and what it guarantees. The test records the loads, stores and fences of
the code in `shm`, carries them out in every order that the Arm model allows, and lets the code judge what it would have read:

- A row of the table (`shm.seqlock`) is read as it was written, or is recognised as torn. Without its fences, torn rows are accepted.
- A copy of the table with a new epoch has all rows of that epoch. Without the fence behind the epoch, it may lack a new endpoint.
- A document is read as it was written; its CRC suffices for this. Without its fences, the current version may be unreadable.
- An index entry is one word, so a reader never combines the tag of one entry with the owner of another. So it needs no fence.

`shm.series` and `shm.flow_areas` have fences for the same reason as documents: the number that makes other words valid is stored last.
"""

import platform
import struct
import sys
from _thread import allocate_lock  # not from threading, because a forking process must not import it
from collections.abc import Callable

from compiled import kernels

KEEPS_ORDER = frozenset({"x86_64", "AMD64"})  # total store order


def no_fence() -> None:
    """Does nothing, because the CPU keeps the order of loads and the order of stores."""


def lock_fence() -> None:
    """Orders all accesses before and after this call. Uses a separate lock in each call, so threads do not disturb each other."""
    lock = allocate_lock()
    lock.acquire()
    lock.release()
    lock.acquire()  # no later access takes effect before the acquire, which takes effect after the release


def choose(machine: str) -> Callable[[], None]:
    """Returns the fence for a machine, whose name is that of `platform.machine()`. An unknown machine also gets a fence that orders."""
    if machine in KEEPS_ORDER:
        return no_fence
    return kernels.fence if kernels.NATIVE else lock_fence


order = choose(platform.machine())


def refuse_machine(byteorder: str, pointer_bytes: int) -> str | None:
    """Returns why shared layouts cannot work on a machine with this byte order and pointer size, or None if they work."""
    if byteorder != "little":
        return f"shared layouts are little-endian, this machine is {byteorder}-endian"
    if pointer_bytes != 8:
        return f"aligned 8-byte stores need a 64-bit machine, this one has {pointer_bytes * 8} bits"
    return None


def check_machine() -> None:
    """Raises ImportError on a machine where the layouts would be wrong."""
    refusal = refuse_machine(sys.byteorder, struct.calcsize("P"))
    if refusal is not None:
        raise ImportError(refusal)
