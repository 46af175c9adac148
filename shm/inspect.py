"""`python -m shm.inspect --list`: prints the names of all shared memory of pickers on this machine. `epp top` shows what it contains."""

import argparse
import os
from collections.abc import Iterator

from shm.layout import HEADER_BYTES, MAGIC, WORD
from shm.segment import SHM_DIRECTORY


def names() -> Iterator[str]:
    """Returns the names of all segments on this machine that this user may read and that this program made, as the magic in their header
    shows.
    """
    for entry in sorted(os.scandir(SHM_DIRECTORY), key=lambda entry: entry.name):
        if entry.is_file() and os.access(entry.path, os.R_OK):
            with open(entry.path, "rb") as segment:
                if segment.read(HEADER_BYTES)[:WORD] == MAGIC.to_bytes(WORD, "little"):
                    yield "/" + entry.name


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m shm.inspect", description=__doc__)
    parser.add_argument("--list", action="store_true", required=True, help="print the names of all segments")
    parser.parse_args()
    print("\n".join(names()))


if __name__ == "__main__":
    main()
