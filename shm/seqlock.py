"""Versioned rows: one writer marks a row odd, writes it, marks it even; readers compare versions.

    row   | version | body word 0 | body word 1 | ... | body word n-1 |

- An odd version means: being written, or left half-written by a writer that died.
- A reader takes a body only between two equal, even versions; else the row is marked torn.
- Versions wrap at 2**64.

The functions take anything that can be indexed and sliced like a memoryview of words, so that the
tests run exactly this code over memory that lets the other side in at every step
(`tests/interleave.py`). What order the CPU keeps is `shm/fence.py`'s subject.
"""

import numpy as np
import numpy.typing as npt

READ_TRIES_MAX = 16
VERSION_MASK = (1 << 64) - 1

Rows = npt.NDArray[np.uint64]


def begin(words: memoryview, at: int) -> int:
    """Mark the row as being written; also right after a writer that died inside a row."""
    odd = ((words[at] + 1) | 1) & VERSION_MASK
    words[at] = odd
    return int(odd)


def end(words: memoryview, at: int, odd: int) -> None:
    """Mark the row as whole again."""
    words[at] = (odd + 1) & VERSION_MASK


def write_row(words: memoryview, at: int, body: memoryview) -> None:
    """Replace the body of the row at `at`."""
    odd = begin(words, at)
    words[at + 1 : at + 1 + len(body)] = body
    end(words, at, odd)


def read_rows(rows: Rows) -> tuple[Rows, Rows]:
    """A copy of rows (version first, XOR of the body last) and, per row, nonzero when torn.

    The XOR over a whole row is its version when the body is whole: every body word meets itself
    in the check word.
    """
    before = rows[:, 0].copy()
    copy = rows.copy()
    torn = before ^ rows[:, 0]
    torn |= before ^ np.bitwise_xor.reduce(copy, axis=1)
    torn |= before & 1
    return copy, torn
