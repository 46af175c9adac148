"""Versioned rows (seqlock): one writer makes a row's version odd, writes the row, and makes the version even again.

    row   | version | body word 0 | body word 1 | ... | body word n-1 |

- An odd version means that a writer is writing the row, or died while it wrote.
- A reader accepts a body only between two equal, even versions. Otherwise it takes the row as torn.
- Versions wrap at 2**64.

The functions accept anything that can be indexed and sliced like a memoryview of words. So tests can
run this code on memory that lets a reader or a second writer run between any two accesses
(`tests/interleave.py`). The fences keep the order of version and body (`shm.fence`).
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from compiled import kernels
from shm import fence

READ_TRIES_MAX: Final = 16
VERSION_MASK: Final = (1 << 64) - 1

Rows = npt.NDArray[np.uint64]


def begin(words: memoryview, at: int) -> int:
    """Makes the row's version odd, and returns it. This also works if the previous writer died while it wrote the row."""
    odd = ((words[at] + 1) | 1) & VERSION_MASK
    words[at] = odd
    fence.order()
    return int(odd)


def end(words: memoryview, at: int, odd: int) -> None:
    """Makes the row's version even again."""
    fence.order()
    words[at] = (odd + 1) & VERSION_MASK


def write_row(words: memoryview, at: int, body: memoryview) -> None:
    """Replaces the body of the row at `at`."""
    odd = begin(words, at)
    words[at + 1 : at + 1 + len(body)] = body
    end(words, at, odd)


def read_rows(rows: Rows) -> tuple[Rows, Rows]:
    """Copies rows and checks each. Returns the copy and one word per row, which is nonzero if the row is torn.

    `rows`: uint64, shape (n, words). The first word of a row is its version, the last one the XOR of all words between. So in a whole
    row the XOR of all words equals the version.
    """
    if kernels.NATIVE and isinstance(rows, np.ndarray):
        return kernels.read_rows(rows)
    return reference_read_rows(rows)


def reference_read_rows(rows: Rows) -> tuple[Rows, Rows]:
    """Computes `read_rows` without the C kernel."""
    before = rows[:, 0].copy()
    fence.order()
    copy = rows.copy()
    fence.order()
    torn = before ^ rows[:, 0]
    torn |= before ^ np.bitwise_xor.reduce(copy, axis=1)
    torn |= before & 1
    return copy, torn
