"""How the C library keeps memory that was freed.

By default glibc gives blocks over 128 KiB back to the kernel at once, and every long prompt then pays a page fault per 4 KiB for
each of its copies: half of the CPU time of a 400 KB request. Set before the fork; children inherit it.
"""

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEEP_BLOCKS_UP_TO = 4 << 20
KEEP_AT_MOST = 16 << 20  # of free memory at the heap's end


def keep_freed_memory() -> bool:
    """Whether this C library could be told; others than glibc are left as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, KEEP_BLOCKS_UP_TO) and mallopt(M_TRIM_THRESHOLD, KEEP_AT_MOST))
