"""Makes the C library keep freed memory.

By default, glibc returns freed blocks over 128 KiB to the kernel at once. Then every copy of a long prompt causes a page fault per
4 KiB, and these faults take half of the CPU time of a 400 KB request. The parent changes the thresholds before it forks, and its
children inherit them.
"""

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEEP_BLOCKS_UP_TO = 4 << 20
KEEP_AT_MOST = 16 << 20  # bytes of free memory at the end of the heap


def keep_freed_memory() -> bool:
    """Sets the thresholds and returns whether the C library accepted them. If the C library is not glibc, does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, KEEP_BLOCKS_UP_TO) and mallopt(M_TRIM_THRESHOLD, KEEP_AT_MOST))
