"""What earlier versions have stored: one folder per version in `tests/upgrades/samples`, with one file of each kind.

    prefix-index, held-blocks, latency-model     --state-dir
    recording.epprec                             --record-dir
    message                                      from another replica
    segment                                      shared memory of a running picker
    configuration.yaml                           a configuration file
    chart.tgz                                    the Helm chart

`python -m tests.upgrades.samples` writes those of the present version; a release does so once, and never changes those of earlier ones.
"""

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Final

from epp.recording.records import VERSION as RECORDING
from epp.recording.records import Lost, Opened, batch, frame
from shm.documents import DocumentSchema, DocumentWriter
from shm.layout import Plan
from shm.segment import Segment
from shm.table import State, TableSchema, TableWriter
from tests.deploy.renderers import CHART
from tests.workers.replicas.messages import message
from tests.workers.supervisor.endpoints.test_index_state import Life as PrefixLife
from tests.workers.supervisor.kv_events.test_held_state import Life as HeldLife
from tests.workers.supervisor.test_latency_keeper import Site, observe
from workers.cli.manifests.helm import program
from workers.shared.recording import framing

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = Path(__file__).parent / "samples"
VERSION: Final = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
INDEX_ENTRIES: Final = 512
BLOCKS_EACH: Final = 20  # of each endpoint, in the prefix index
HELD_BLOCKS: Final = 256
SAMPLES: Final = 100  # that the latency model has learned from
LOADS: Final = {5: (3, 1000)}  # of the message: endpoint -> requests, tokens in flight
LOST: Final = 3  # records that the recording says it has lost
DOCUMENT: Final = b"a document"
RECORDS: Final = [Opened(RECORDING, "earlier", 1, 1000.0, 10.0, 5), Lost(1.0, LOST)]
TABLE: Final = TableSchema(("waiting",), 2)
DOCUMENTS: Final = DocumentSchema((64,))
PLAN: Final = Plan({"table": TABLE, "documents": DOCUMENTS})


def versions() -> list[str]:
    """The versions that have samples, in the order of their names."""
    return sorted(folder.name for folder in FOLDER.iterdir())


def prefix_life(folder: Path) -> PrefixLife:
    return PrefixLife(folder, entries=INDEX_ENTRIES)


def held_life(folder: Path) -> HeldLife:
    return HeldLife(folder, blocks=HELD_BLOCKS)


def write_all(folder: Path) -> None:
    """Writes a sample of each kind into a folder."""
    folder.mkdir(parents=True)
    prefix = prefix_life(folder)
    prefix.fill(BLOCKS_EACH)
    prefix.save()
    held = held_life(folder)
    held.fill()
    held.save()
    _write_model(folder)
    packed = framing.Packer().pack(frame([batch(RECORDS)]), len(RECORDS))
    (folder / "recording.epprec").write_bytes(framing.head() + packed)
    (folder / "message").write_bytes(message(loads=LOADS, whole=True))
    _write_segment(folder / "segment")
    (folder / "configuration.yaml").write_text((ROOT / "deploy" / "config" / "default.yaml").read_text())
    _write_chart(folder / "chart.tgz")


def _write_model(folder: Path) -> None:
    site = Site(str(folder))
    site.endpoints("a")
    keeper = site.keeper()
    keeper.look()
    observe(keeper, 0, 0.2, SAMPLES)
    keeper.save()


def _write_segment(path: Path) -> None:
    segment = Segment.create_planned(f"/epp-sample-{path.parent.name}", PLAN)
    try:
        table = TableWriter(TABLE, segment.planned(PLAN, "table"))
        handle = table.take(7, lambda slot: True)
        table.write(handle, state=State.FRESH, flags=0, updated_at=1.0, inflight_at_scrape=0.0, values=(4.0,), present=1)
        table.publish()
        DocumentWriter(DOCUMENTS, segment.planned(PLAN, "documents")).write(0, DOCUMENT)
        path.write_bytes(bytes(segment._whole))
    finally:
        segment.unlink()
        segment.close()


def _write_chart(path: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([program(), "package", CHART, "--destination", directory], check=True, stdout=subprocess.DEVNULL)
        (packed,) = Path(directory).iterdir()
        path.write_bytes(packed.read_bytes())


if __name__ == "__main__":
    if (FOLDER / VERSION).exists():
        sys.exit(f"{FOLDER / VERSION} exists: samples of a version are written once, at its release")
    write_all(FOLDER / VERSION)
    print(f"{FOLDER / VERSION}: {', '.join(sorted(path.name for path in (FOLDER / VERSION).iterdir()))}")
