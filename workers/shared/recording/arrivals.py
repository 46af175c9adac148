"""Reads the arrivals of any trace: of a recording, or of a public format (`epp.recording.imports`)."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from epp.recording.imports import Arrival, BadTrace
from epp.recording.imports import arrivals as imported
from epp.recording.trace import requests
from workers.shared.recording import Unreadable
from workers.shared.recording.reader import batches_of

SUFFIX = ".epprec"
HEAD_MAGIC = b"\x5e\x2a\x4d\x18"


def arrivals(path: str, report: Callable[[str], object]) -> Iterator[Arrival]:
    """Yields the arrivals of the trace at `path`; those of a recording in the order of their ends. Raises Unreadable.

    `report` gets a sentence for each part of a recording that is unreadable.
    """
    try:
        if is_recording(path):
            yield from _recorded(path, report)
            return
        opened = gzip.open if path.endswith(".gz") else open
        with opened(path, "rt", encoding="utf-8", errors="replace", newline="") as lines:
            yield from imported(lines)
    except gzip.BadGzipFile as wrong:
        raise Unreadable(f"{path}: not packed with gzip, although the name ends with .gz: rename the file") from wrong
    except (EOFError, zlib.error) as cut:
        raise Unreadable(f"{path}: the packed file is cut off or damaged: copy it again") from cut
    except OSError as refused:
        raise Unreadable(f"{path}: {refused.strerror or refused}") from refused
    except BadTrace as wrong:
        raise Unreadable(f"{path}: {wrong}") from wrong


def is_recording(path: str) -> bool:
    """Returns whether `path` is a recording, by its name or its first bytes, or a folder. Raises Unreadable."""
    try:
        if Path(path).is_dir() or path.endswith(SUFFIX):
            return True
        with open(path, "rb") as file:
            return file.read(len(HEAD_MAGIC)) == HEAD_MAGIC
    except OSError as refused:
        raise Unreadable(f"{path}: {refused.strerror}") from refused


def _recorded(path: str, report: Callable[[str], object]) -> Iterator[Arrival]:
    for request in requests(batches_of(path, report)):
        decided, ended = request.decided, request.ended
        prompt = ended.prompt if ended is not None else None
        blocks = memoryview(decided.hashes).cast("Q").tolist()
        yield Arrival(
            request.at,
            decided.prompt_tokens if prompt is None else prompt,
            (ended.completion or 0) if ended is not None else 0,
            blocks,
            decided.block_tokens,
            decided.model,
        )
