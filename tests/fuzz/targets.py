"""All targets by name, and the corpus: small inputs of each target. Every test run replays the corpus.

A file of the corpus is one input. `python -m tests.fuzz --write-corpus` writes the seeds. A file with
the prefix `found-` was a finding once, and stays as a regression test.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.fuzz.body_targets import BODIES, GZIP, REWRITE
from tests.fuzz.peer_targets import KV_EVENTS, REPLICAS
from tests.fuzz.stream_targets import EXT_PROC
from tests.fuzz.target import Target
from tests.fuzz.text_targets import ANSWERS, BUS, CONFIG, PAGES, USAGE
from tests.fuzz.wire_targets import GRPC, HPACK, HTTP2

TARGETS: Final[Mapping[str, Target]] = {
    target.name: target
    for target in (HTTP2, HPACK, GRPC, EXT_PROC, BODIES, REWRITE, GZIP, USAGE, PAGES, ANSWERS, BUS, KV_EVENTS, REPLICAS, CONFIG)
}
CORPUS: Final = Path(__file__).parent / "corpus"


def corpus(target: Target) -> dict[str, bytes]:
    """The saved inputs of a target, by file name."""
    return {path.name: path.read_bytes() for path in sorted((CORPUS / target.name).glob("*"))}


def write_corpus() -> int:
    """Writes the seeds of all targets as files. Returns their size in bytes."""
    written = 0
    for target in TARGETS.values():
        folder = CORPUS / target.name
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in target.seeds().items():
            (folder / name).write_bytes(data)
            written += len(data)
    return written
