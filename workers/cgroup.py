"""Where the limits of this process's cgroups stand: both versions, each group up to the root, since one above may be the tighter."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def folders(controller: str, root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> Iterator[Path]:
    """This process's groups of a controller and all above them, as far as they are mounted here."""
    for line in text(own).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2 has one tree for all controllers
            base = root
        elif controller in controllers.split(","):
            base = root / controller
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for folder in (group, *group.parents):
            yield base / folder


def text(file: Path) -> str:
    """What a file of the kernel says; nothing where it is not there."""
    try:
        return file.read_text()
    except OSError:
        return ""
