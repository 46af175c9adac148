"""All targets by name, and the corpus: small inputs of each, replayed by every test run.

A file of the corpus is one input. Seeds are written by `python -m tests.fuzz --write-corpus`; files whose names begin with `found-` were
findings once, and stay so that they are none again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.fuzz.body_targets import BODIES, EXT_PROC, GZIP, REWRITE
from tests.fuzz.target import Target
from tests.fuzz.text_targets import ANSWERS, BUS, CONFIG, PAGES, USAGE
from tests.fuzz.wire_targets import GRPC, HPACK, HTTP2

TARGETS: Final[Mapping[str, Target]] = {
    target.name: target
    for target in (HTTP2, HPACK, GRPC, EXT_PROC, BODIES, REWRITE, GZIP, USAGE, PAGES, ANSWERS, BUS, CONFIG)
}
CORPUS: Final = Path(__file__).parent / "corpus"


def corpus(target: Target) -> dict[str, bytes]:
    """The inputs kept for a target, by file name."""
    return {path.name: path.read_bytes() for path in sorted((CORPUS / target.name).glob("*"))}


def write_corpus() -> int:
    """The seeds of all targets as files; how many bytes they are."""
    written = 0
    for target in TARGETS.values():
        folder = CORPUS / target.name
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in target.seeds().items():
            (folder / name).write_bytes(data)
            written += len(data)
    return written
