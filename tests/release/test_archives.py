"""The same files give the same bytes, whatever their times, owners and order on the disk."""

import gzip
import io
import os
import tarfile
from pathlib import Path

from release import archives
from release.source import Source

EPOCH = 1_700_000_000


def files(folder: Path, names: list[str], mode: int, time: int) -> dict[str, Path]:
    found = {}
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        path.chmod(mode)
        os.utime(path, (time, time))
        found[name] = path
    return found


def test_times_modes_and_order_of_files_do_not_matter(tmp_path: Path) -> None:
    one = archives.tarred(files(tmp_path / "1", ["b", "a/c"], 0o644, 1), EPOCH)
    other = archives.tarred(files(tmp_path / "2", ["a/c", "b"], 0o600, 2), EPOCH)
    assert one == other
    with tarfile.open(fileobj=io.BytesIO(one)) as archive:
        assert [(info.name, info.mode, info.mtime, info.uid) for info in archive] == [("a/c", 0o644, EPOCH, 0), ("b", 0o644, EPOCH, 0)]


def test_programs_stay_programs_and_links_stay_links(tmp_path: Path) -> None:
    entries = files(tmp_path, ["program"], 0o700, 1)
    (tmp_path / "link").symlink_to("program")
    with tarfile.open(fileobj=io.BytesIO(archives.tarred(entries | {"link": tmp_path / "link"}, EPOCH))) as archive:
        assert archive.getmember("program").mode == 0o755
        assert archive.getmember("link").linkname == "program"


def test_the_chart_is_an_archive_as_helm_reads_it(tmp_path: Path) -> None:
    chart = tmp_path / archives.CHART
    files(chart, ["Chart.yaml", "templates/a.yaml"], 0o644, 1)
    made = archives.chart(Source(tmp_path, "1.2.3", "a" * 40, EPOCH), tmp_path)
    assert made.name == "endpoint-picker-1.2.3.tgz"
    with tarfile.open(made) as archive:
        assert archive.getnames() == ["endpoint-picker/Chart.yaml", "endpoint-picker/templates/a.yaml"]


def test_compressed_data_has_the_time_of_the_commit() -> None:
    data = archives.zipped(b"x", EPOCH)
    assert gzip.decompress(data) == b"x"
    assert int.from_bytes(data[4:8], "little") == EPOCH
