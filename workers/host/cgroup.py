"""Finds the folders with the limits of this process's cgroups, in version 1 and 2 of cgroups.

The folders of all parent groups are included, because a parent may have the tighter limit.
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def folders(controller: str, root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> Iterator[Path]:
    """Yields the folder of this process's cgroup for `controller` ("cpu", "memory"), then the folders of all its parents.

    A folder may be missing in this container.
    """
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
    """The contents of a kernel file; "" if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
