"""Tests that what earlier versions have stored is read, or refused with a message that says why (`tests/upgrades/samples.py`)."""

import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from epp.config.load import load
from shm.documents import DocumentReader
from shm.observe import LayoutError, parts
from shm.segment import SHM_DIRECTORY, Segment
from shm.table import TableReader
from tests.upgrades import samples
from tests.workers.replicas.messages import loads_of
from tests.workers.supervisor.endpoints.test_index_state import NAMES as PREFIX_NAMES
from tests.workers.supervisor.kv_events.test_held_state import NAMES as HELD_NAMES
from workers.replicas.reading import decode
from workers.replicas.wire import NotUsable
from workers.shared.recording import Unreadable
from workers.shared.recording.reader import batches_of
from workers.supervisor.endpoints.latency_state import LatencyState

EACH = pytest.mark.parametrize("version", samples.versions())
SEGMENT = "/epp-earlier-version"


@pytest.fixture
def stored(version: str, tmp_path: Path) -> Path:
    """A copy of the samples of a version."""
    return Path(shutil.copytree(samples.FOLDER / version, tmp_path / version))


def refused(lines: list, *words: str) -> bool:
    """Whether the one line of the log is a refusal. It must give a reason with one of these words."""
    (line,) = lines
    if line["log_level"] != "warning":
        return False
    assert any(word in line["why"] for word in words), line
    return True


def test_this_version_has_samples() -> None:
    assert samples.VERSION in samples.versions(), "python -m tests.upgrades.samples writes them"


@EACH
def test_the_prefix_index_is_taken_over_or_refused(stored: Path) -> None:
    life = samples.prefix_life(stored)
    with capture_logs() as lines:
        owners = life.state.load()
    if not refused(lines, "version", "layout"):
        assert sorted(owners) == sorted(PREFIX_NAMES)
        assert life.writer.size() == samples.BLOCKS_EACH * len(PREFIX_NAMES)


@EACH
def test_held_blocks_are_taken_over_or_refused(stored: Path) -> None:
    life = samples.held_life(stored)
    with capture_logs() as lines:
        loaded = life.state.load()
    if not refused(lines, "version", "layout"):
        assert loaded is not None and list(loaded.streams) == HELD_NAMES


@EACH
def test_the_latency_model_is_taken_over_or_refused(stored: Path) -> None:
    with capture_logs() as lines:
        _, known = LatencyState(str(stored)).load()
    if not refused(lines, "version"):
        (endpoint,) = known.values()
        assert endpoint.samples == samples.SAMPLES


@EACH
def test_a_recording_is_read_or_refused(stored: Path) -> None:
    try:
        read = [record for found in batches_of(str(stored / "recording.epprec"), pytest.fail) for record in found]
    except Unreadable as why:
        assert "version" in str(why)
    else:
        opened, lost = read
        assert (opened.unix_s, lost) == (samples.RECORDS[0].unix_s, samples.RECORDS[1])


@EACH
def test_the_message_of_a_replica_is_read_or_counted_as_of_another_form(stored: Path) -> None:
    try:
        message = decode((stored / "message").read_bytes())
    except NotUsable as why:
        assert why.why == "form"
    else:
        assert dict(loads_of(message.loads)) == samples.LOADS


@EACH
def test_a_segment_is_read_or_said_to_be_of_another_version(stored: Path) -> None:
    content = (stored / "segment").read_bytes()
    file = Path(f"{SHM_DIRECTORY}{SEGMENT}")
    file.write_bytes(content)
    try:
        segment = Segment.attach(SEGMENT, None, writable=False)
        try:
            read = parts(segment)
        except LayoutError as why:
            assert "version" in str(why)
        else:
            table = TableReader(samples.TABLE, read["table"].region).copy()
            assert table.column(0).tolist() == [4.0]
            assert DocumentReader(samples.DOCUMENTS, read["documents"].region).read(0) == (1, samples.DOCUMENT)
            del table, read
        segment.close()
    finally:
        file.unlink()


@EACH
def test_a_configuration_is_accepted(stored: Path) -> None:
    path = stored / "configuration.yaml"
    assert load(path.read_text(), str(path)).pipeline.profiles
