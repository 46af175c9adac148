"""The files of a recording: written by a thread, bounded, readable after any damage up to it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epp.recording.records import VERSION, Lost, Opened, Record, batch, frame
from epp.recording.trace import requests
from tests.loadtest.replay.recordings import write
from workers.cli.record import export
from workers.shared.recording import Frame, Limits, Unreadable, framing, reader
from workers.shared.recording.export import row, to_parquet
from workers.shared.recording.files import RecordFiles
from workers.shared.recording.reader import batches_of

OPENED = Opened(VERSION, "0.1", 1, 1000.0, 10.0, 5)


def content(*records: Record) -> bytes:
    return frame([batch(list(records))])


@pytest.fixture
def files(tmp_path: Path) -> Iterator[RecordFiles]:
    files = RecordFiles(str(tmp_path / "rec"), "epp-9002", Limits())
    yield files
    files.end()


def read(path: str | Path) -> tuple[list[Record], list[str]]:
    said: list[str] = []
    return [record for found in batches_of(str(path), said.append) for record in found], said


def written(path: Path, *contents: bytes) -> Path:
    packer = framing.Packer()
    path.write_bytes(framing.head() + b"".join(packer.pack(each, 1) for each in contents))
    return path


def test_frames_are_read_back_in_order(files: RecordFiles) -> None:
    files.put(Frame(1, content(OPENED), 1))
    files.put(Frame(1, content(Lost(1.0, 3)), 1))
    files.put(Frame(2, content(OPENED, Lost(2.0, 4)), 2))
    files.end()
    assert read(files.folder) == ([OPENED, Lost(1.0, 3), OPENED, Lost(2.0, 4)], [])
    assert (files.records, files.lost, len(files.names)) == (4, 0, 2)
    assert files.bytes == sum(os.path.getsize(name) for name in files.names) - 2 * framing.HEAD.size
    assert {os.stat(name).st_mode & 0o777 for name in files.names} == {0o600}


def test_the_oldest_files_are_removed_and_those_of_others_stay(tmp_path: Path) -> None:
    other = tmp_path / "epp-9002-notes.epprec"
    other.write_text("mine")
    files = RecordFiles(str(tmp_path), "epp-9002", Limits(files=3))
    for number in range(1, 6):
        files.put(Frame(number, content(OPENED), 1))
        files.put(Frame(number, None, 0))
    files.end()
    assert len(files.names) == 3 and all(map(os.path.exists, files.names))
    assert sorted(os.listdir(tmp_path)) == sorted([other.name, *map(os.path.basename, files.names)])


def test_a_full_disk_keeps_whole_frames(files: RecordFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    files.end()  # this thread plays the part of the writing one
    files._take(Frame(2, content(OPENED), 1))
    real = os.write
    monkeypatch.setattr("workers.shared.recording.files.os.write", lambda to, data: real(to, data[: len(data) // 2]))
    with pytest.raises(OSError, match="No space left"):
        files._take(Frame(2, content(Lost(1.0, 9)), 5))
    monkeypatch.undo()
    files._take(Frame(2, content(Lost(2.0, 1)), 1))
    files._take(Frame(2, None, 0))
    assert read(files.names[-1]) == ([OPENED, Lost(2.0, 1)], [])


def test_a_folder_that_vanishes_loses_records_and_says_why(tmp_path: Path) -> None:
    files = RecordFiles(str(tmp_path / "rec"), "epp-9002", Limits())
    os.rmdir(files.folder)
    files.put(Frame(1, content(OPENED), 7))
    files.end()
    assert (files.lost, files.why) == (7, "No such file or directory")


def test_a_queue_that_is_full_takes_no_frame(files: RecordFiles) -> None:
    files.end()  # nothing takes frames any more
    taken = [files.put(Frame(1, content(OPENED), 1)) for _ in range(100)]
    assert taken[0] and not taken[-1]


def test_a_file_that_is_cut_is_read_up_to_its_last_whole_frame(tmp_path: Path) -> None:
    whole = written(tmp_path / "a.epprec", content(OPENED), content(Lost(1.0, 1))).read_bytes()
    second = len(framing.head() + framing.Packer().pack(content(OPENED), 1))
    for length in range(framing.HEAD.size, len(whole)):
        cut = tmp_path / "cut.epprec"
        cut.write_bytes(whole[:length])
        records, said = read(cut)
        assert records == ([OPENED] if length >= second else [])
        assert len(said) == (length not in (second, framing.HEAD.size))
        assert all("cut off at byte" in text for text in said)


def test_a_damaged_frame_is_left_out_and_the_next_one_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "a.epprec", content(OPENED), content(Lost(1.0, 1)), content(Lost(2.0, 2)))
    data = bytearray(path.read_bytes())
    at = len(framing.head() + framing.Packer().pack(content(OPENED), 1)) + framing.MARK.size
    data[at + 8] ^= 0xFF
    path.write_bytes(data)
    records, (said,) = read(path)
    assert records == [OPENED, Lost(2.0, 2)] and "damaged" in said and "1 records" in said


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "empty"),
        (b"{}", "not a recording"),
        (b"PAR1" + bytes(64), "not a recording"),
        (framing.head()[:20], "not a recording"),
        (framing.HEAD.pack(framing.HEAD_MAGIC, 24, b"another program ", 1, 0), "not a recording"),
        (framing.HEAD.pack(framing.HEAD_MAGIC, 24, framing.NAME, VERSION + 1, 0), "use the picker's own version"),
    ],
)
def test_a_foreign_empty_or_newer_file_is_refused(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "x.epprec"
    path.write_bytes(data)
    with pytest.raises(Unreadable, match=why):
        read(path)


def test_a_file_that_the_picker_removes_during_the_reading_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    first, second, third = (written(tmp_path / f"{name}.epprec", content(OPENED), content(Lost(1.0, 1))) for name in "abc")
    for age, path in enumerate((first, second, third)):
        os.utime(path, (age, age))
    said: list[str] = []
    batches = batches_of(str(tmp_path), said.append)
    found = next(batches)
    second.unlink()
    assert [found, *batches] == 2 * [[OPENED], [Lost(1.0, 1)]]
    assert said == [f"{second}: No such file or directory"]


@pytest.mark.parametrize("form", ["--parquet", "--jsonl"])
def test_an_export_that_cannot_be_written_names_its_file(tmp_path: Path, form: str) -> None:
    pytest.importorskip("pyarrow")
    path = written(tmp_path / "a.epprec", content(OPENED))
    done = CliRunner().invoke(export, [str(path), form, str(tmp_path / "none" / "out")])
    assert (done.exit_code, done.output.count("\n")) == (1, 1)
    assert done.output.startswith(f"Error: {tmp_path}/none/out cannot be written: ")


def test_missing_and_empty_folders_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="has no recording"):
        read(tmp_path)
    with pytest.raises(Unreadable, match="No such file"):
        read(tmp_path / "nothing.epprec")


def test_a_frame_that_would_need_too_much_memory_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "CONTENT_BYTES_MAX", 100)
    path = written(tmp_path / "a.epprec", content(OPENED), bytes(101))
    records, (said,) = read(path)
    assert records == [OPENED] and "at most 100 are possible" in said


def test_a_length_that_no_frame_has_ends_the_reading(tmp_path: Path) -> None:
    path = written(tmp_path / "a.epprec", content(OPENED))
    mark = framing.MARK.pack(framing.MARK_MAGIC, 12, framing.MARK_NAME, reader.PACKED_BYTES_MAX + 1, 1)
    path.write_bytes(path.read_bytes() + mark)
    records, (said,) = read(path)
    assert records == [OPENED] and "damaged at byte" in said


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_bytes_raises_anything_but_unreadable(tmp_path: Path, data: st.DataObject) -> None:
    path = written(tmp_path / "a.epprec", content(OPENED), content(Lost(1.0, 1)))
    changed = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(changed)
    try:
        records, _ = read(path)
    except Unreadable:
        return
    assert set(map(type, records)) <= {Opened, Lost}


def test_a_parquet_file_has_a_column_for_each_value_of_a_request(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    (traced, *_) = requests(batches_of(write(tmp_path / "recording", 2), print))
    assert to_parquet([traced], tmp_path / "a.parquet") == 1
    assert parquet.read_schema(tmp_path / "a.parquet").names == list(row(traced))
