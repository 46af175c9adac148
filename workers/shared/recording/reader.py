"""Reads recordings: files in a folder, or single files, as records. Says what it could not read.

A file is read frame by frame, so the memory that it takes does not depend on its size. What a file cannot mean raises `Unreadable`: it is
no recording, or a newer version wrote it. What is damaged is left out and reported: a frame with a wrong checksum, or a file that ends in
the middle of a frame, as after a kill.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from epp.recording.records import VERSION, CorruptFrame, Opened, Record, decode
from workers.shared.recording import Unreadable
from workers.shared.recording.files import SUFFIX
from workers.shared.recording.framing import HEAD, HEAD_MAGIC, MARK, MARK_MAGIC, MARK_NAME, NAME, PACKED_BYTES_MAX, PREFIX_BYTES, unpack
from workers.shared.recording.one_pool import of_pool

FILES_MAX: Final = 4096

Report = Callable[[str], object]


def files_of(path: str) -> list[Path]:
    """Returns the files of a recording in the order in which they were begun: the file `path`, or all in the folder. Raises Unreadable."""
    found = Path(path)
    try:
        if not found.is_dir():
            return [found]
        files = [Path(entry.path) for entry in os.scandir(found) if entry.name.endswith(SUFFIX)]
    except OSError as refused:
        raise Unreadable(f"{path}: {refused.strerror}") from refused
    if not files:
        raise Unreadable(f"{path}: the folder has no recording (*{SUFFIX})")
    if len(files) > FILES_MAX:
        raise Unreadable(f"{path}: the folder has {len(files)} recordings; give one file, or a folder of at most {FILES_MAX}")
    return sorted(files, key=lambda file: (file.stat().st_mtime, file.name))


def batches_of(path: str, tell: Report) -> Iterator[list[Record]]:
    """Yields the batches of all files. `tell` gets a sentence for each part that is unreadable. Raises Unreadable for a foreign file."""
    for file in files_of(path):
        yield from batches(file, tell)


def batches_of_pool(path: str, tell: Report, pool: str) -> Iterator[list[Record]]:
    """Yields the batches of one pool, "" for the only one. Raises Unreadable, also if the recording has several pools, or others."""
    yield from of_pool(batches_of(path, tell), pool, path)


def batches(path: Path, tell: Report) -> Iterator[list[Record]]:
    """Yields the batches of one file. Raises Unreadable if it is no recording that this version reads."""
    try:
        with path.open("rb") as file:
            _check_head(path, file.read(HEAD.size))
            yield from _frames(path, file, tell)
    except OSError as refused:
        raise Unreadable(f"{path}: {refused.strerror}") from refused


def _check_head(path: Path, found: bytes) -> None:
    if not found:
        raise Unreadable(f"{path}: the file is empty: its picker ended before it wrote anything")
    if len(found) < HEAD.size or not found.startswith(HEAD_MAGIC.to_bytes(4, "little")):
        raise Unreadable(f"{path}: not a recording of an endpoint picker; `epp record` writes them")
    _, size, name, version, _ = HEAD.unpack(found)
    if size != HEAD.size - PREFIX_BYTES or name != NAME:
        raise Unreadable(f"{path}: not a recording of an endpoint picker; `epp record` writes them")
    if version > VERSION:
        raise Unreadable(f"{path}: version {version} of the format, and this epp reads up to {VERSION}: use the picker's own version")


def _frames(path: Path, file: BinaryIO, tell: Report) -> Iterator[list[Record]]:
    """Yields the batches of the whole frames. Leaves out damaged ones; stops where the next mark cannot be found."""
    frames = 0
    while mark := file.read(MARK.size):
        at = file.tell() - len(mark)
        if len(mark) < MARK.size:
            tell(f"{path}: cut off at byte {at}; the {frames} frames before are read")
            return
        magic, size, name, length, records = MARK.unpack(mark)
        if (magic, size, name) != (MARK_MAGIC, MARK.size - PREFIX_BYTES, MARK_NAME) or length > PACKED_BYTES_MAX:
            tell(f"{path}: damaged at byte {at}; the {frames} frames before are read")
            return
        packed = file.read(length)
        if len(packed) < length:
            tell(f"{path}: cut off at byte {at}; the {frames} frames before are read")
            return
        try:
            found = decode(unpack(packed))
        except (ValueError, CorruptFrame) as damaged:
            tell(f"{path}: the frame at byte {at} is damaged and left out with its {records} records ({damaged})")
            continue
        if not frames and not (found and found[0] and isinstance(found[0][0], Opened)):
            tell(f"{path}: its first frame is missing, so times and endpoints may be incomplete")
        frames += 1
        yield from found
