"""Blocks of the prefix index for owners that have other names elsewhere: in messages between replicas.

They come in runs of one owner each: the name (u64) of each run, its number of blocks (u16), and all hashes (u64), as bytes.
"""

import numpy as np
import numpy.typing as npt

from shm.prefix_index import Hashes


def owners_of_runs(owner_of: dict[int, int], names: bytes, counts: bytes) -> npt.NDArray[np.uint16]:
    """Returns the owner of each block of some runs, by their names (u64) and numbers of blocks (u16). 0: no owner has the name."""
    owners = [owner_of.get(name, 0) for name in np.frombuffer(names, "<u8").tolist()]
    return np.array(owners, np.uint16).repeat(np.frombuffer(counts, "<u2"))


def owned_blocks(
    hashes: bytes, owner_of: dict[int, int], names: bytes, counts: bytes
) -> tuple[Hashes, npt.NDArray[np.uint16]]:
    """Returns the blocks of the owners that have one of the names, and the owner of each."""
    owners = owners_of_runs(owner_of, names, counts)
    known = owners != 0
    return np.frombuffer(hashes, "<u8")[known], owners[known]
