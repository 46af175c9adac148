"""The folders of several pools in `--state-dir`: one for each pool that has something to keep.

    DIR/pools/NAME/...

A folder outlasts its pool, so a pool that comes back goes on where it was. At the start of the picker, the folders that nothing was
written to for longest are removed, beyond those of the pools and GONE_MAX others. Files that the picker did not write stay.
"""

import contextlib
import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

import structlog

from workers.supervisor.endpoints.latency_state import FILE

if TYPE_CHECKING:
    from workers.process.instance import Instance

POOLS: Final = "pools"
GONE_MAX: Final = 100
FILES: Final = (FILE, f"{FILE}.tmp")

log = structlog.get_logger()


def state_folder(instance: "Instance") -> str:
    """Returns the folder for the state of one pool; "" without --state-dir, and for a place without a pool."""
    folder, name = instance.options.state_dir, instance.options.pool_name
    if not folder or instance.pool is None:
        return folder
    # Names of pools have neither slashes nor a dot at the beginning.
    return os.path.join(folder, POOLS, name) if name else ""


def remove_oldest(folder: str, pools: Collection[str], places: int) -> None:
    """Removes the folders of pools that are gone, beyond GONE_MAX. `pools`: those that are served. `places`: how many can be."""
    try:
        with os.scandir(os.path.join(folder, POOLS)) as entries:
            found = [(entry.stat().st_mtime, entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return
    except OSError as refused:
        log.warning("the state of pools that are gone is not removed", folder=folder, why=refused.strerror)
        return
    others = sorted((each for each in found if os.path.basename(each[1]) not in pools), reverse=True)
    for _, path in others[GONE_MAX + places - len(pools) :]:
        for name in FILES:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(path, name))
        with contextlib.suppress(OSError):  # others have files there
            os.rmdir(path)
        log.info("the state of a pool that is gone is removed", folder=path)
