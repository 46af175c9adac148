"""Archives with the same bytes for the same files: sorted names, one time, no users."""

import gzip
import io
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from release.source import NAME, Source

CHART: Final = "deploy/helm/endpoint-picker"
EXECUTABLE: Final = 0o111


def chart(source: Source, into: Path) -> Path:
    """Makes the archive of the Helm chart, as `helm package` would, which gives every file the present time. Returns its path."""
    folder = source.tree / CHART
    archive = into / f"{NAME}-{source.version}.tgz"
    files = {f"{NAME}/{path.relative_to(folder)}": path for path in folder.rglob("*") if path.is_file()}
    archive.write_bytes(zipped(tarred(files, source.epoch), source.epoch))
    return archive


def documentation(source: Source, into: Path) -> Path:
    """Builds the documentation as a site, and its archive. Returns its path. Raises CalledProcessError."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", "site"]
    environment = {**source.environment, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=source.tree, env=environment, check=True, capture_output=True)
    site, stem = source.tree / "site", f"{NAME}-docs-{source.version}"
    files = {f"{stem}/{path.relative_to(site)}": path for path in site.rglob("*") if path.is_file()}
    archive = into / f"{stem}.tar.gz"
    archive.write_bytes(zipped(tarred(files, source.epoch), source.epoch))
    return archive


def tarred(files: Mapping[str, Path], epoch: int) -> bytes:
    """Returns a tar archive of files, folders and symbolic links, by their names in the archive. Everything belongs to root."""
    return packed(((name, files[name]) for name in sorted(files)), epoch)


def packed(entries: Iterable[tuple[str, Path]], epoch: int) -> bytes:
    """Returns a tar archive of entries in their order. See `tarred`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, path in entries:
            info = archive.gettarinfo(path, name)
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            info.mtime = epoch
            if info.isreg():
                info.mode = 0o755 if info.mode & EXECUTABLE else 0o644
                with path.open("rb") as file:
                    archive.addfile(info, file)
            else:
                archive.addfile(info)
    return buffer.getvalue()


def zipped(data: bytes, epoch: int) -> bytes:
    """Returns the data compressed by gzip, with this time in its head."""
    return gzip.compress(data, compresslevel=9, mtime=epoch)
