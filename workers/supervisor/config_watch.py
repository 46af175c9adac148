"""Watches the files of the configuration: the file itself, the files of --plugin-path, CA files of data sources, and files of API keys.
With several pools, also watches the list of pools, and the configuration file of each pool.

Each check compares inodes, times, sizes, and where symbolic links lead. So the check notices an editor that writes a file, an editor that
renames another file over it, and the kubelet, which swaps one symbolic link of a mounted ConfigMap. Events of inotify only make the check
come sooner. Some folders have no events, such as those on a network, so every folder is checked every LOOK_EVERY_S.

A change is reported after the files have stayed the same for SETTLE_S, because an editor may write a file in parts, and copying files takes
a while.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Final

from epp.config.tenants_section import key_files
from workers.host.directory import LOOK_EVERY_S, changes
from workers.process.generations import GenerationLost
from workers.process.instance import Instance
from workers.process.loading import PLUGIN_FILES_MAX, SUFFIX, UnreadablePlugins, names_in, read_plugins, read_text

SETTLE_S: Final = 0.05
CONFIGURATION: Final = ".yaml"  # the end of the names of the files of --config-dir
POOLS_MAX: Final = 1000  # files of --config-dir

Seen = tuple[tuple[str, int, int, int], ...]  # per file: real path, inode, size, time of the last change


def seen(files: Sequence[str], plugin_path: str, config_dir: str = "") -> Seen:
    """Returns the present state of `files`, of the plugin files in `plugin_path`, and of the configurations in `config_dir`. A missing file
    has zeros.

    Skips empty names in `files`, empty folders, and hidden files, which no reader of a folder reads.
    """
    paths = list(filter(None, files))
    for folder, suffix, most in ((plugin_path, SUFFIX, PLUGIN_FILES_MAX), (config_dir, CONFIGURATION, POOLS_MAX)):
        if folder:
            with contextlib.suppress(OSError):
                paths += [os.path.join(folder, name) for name in names_in(folder, suffix)[: most + 1]]
    found = []
    for path in paths:
        real = os.path.realpath(path)
        try:
            stat = os.stat(real)
            found.append((real, stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            found.append((real, 0, 0, 0))
    return tuple(found)


class ConfigWatch:
    """Calls `changed` after each change of the files."""

    def __init__(self, present: Callable[[], Instance], changed: Callable[[], None], *, successor: bool = False) -> None:
        """`present`: returns the instance under the present configuration. `successor`: whether there was a supervisor before."""
        options = present().options
        self._present = present
        self._successor = successor
        self._config_file = options.config_file
        self._plugin_path, self._config_dir = options.plugin_path, options.config_dir
        self._changed = changed
        self._files = self._named()
        self._known = self._seen()

    async def run(self) -> None:
        """Watches until it is cancelled."""
        if self._differs():  # the files changed while no supervisor watched
            self._changed()
        while True:
            folders = self._folders()
            async with changes(folders) as next_change:
                while folders == self._folders():
                    await next_change(LOOK_EVERY_S)
                    await self.look()

    async def look(self) -> None:
        """Checks the files. If the files have changed, waits until they stay the same, and calls `changed` once.

        Otherwise continues with the files that the present configuration names.
        """
        present = self._seen()
        if present == self._known:
            if (named := self._named()) != self._files:
                self._files = named
                self._known = self._seen()
            return
        while True:
            await asyncio.sleep(SETTLE_S)
            settled = self._seen()
            if settled == present:
                break
            present = settled
        self._known = present
        self._changed()

    def _folders(self) -> list[str]:
        folders = {os.path.dirname(os.path.abspath(path)) for path in self._files if path}
        return sorted(folders | set(filter(None, (self._plugin_path, self._config_dir))))

    def _differs(self) -> bool:
        """Returns whether the files differ from the configuration in force. Returns False if they cannot be read."""
        if self._present().pools:
            return self._successor  # a reload of all pools finds out
        try:
            in_force = self._present().generations.current()
            if not in_force.followed:  # a promoted candidate, or an earlier configuration that is in force again
                return False
            with open(self._config_file, encoding="utf-8-sig") as file:
                text = file.read()
            keys = {path: read_text(path) for path in in_force.keys}
            return (text, read_plugins(self._plugin_path), keys) != (in_force.text, in_force.plugins, in_force.keys)
        except (OSError, ValueError, UnreadablePlugins, GenerationLost):
            return False

    def _seen(self) -> Seen:
        return seen(self._files, self._plugin_path, self._config_dir)

    def _named(self) -> list[str]:
        """Returns the configuration files, and the files that the present configurations name."""
        present = self._present()
        options, pools = present.options, [pool for pool in present.every if pool.pool is None or pool.options.pool_name]
        files = [path for pool in pools for source in pool.sources.all for path in source.files]
        keys = [path for pool in pools for path in key_files(pool.config.tenants)]
        own = [entry.config_file for entry in present.pool_list.values()]
        return list(dict.fromkeys([self._config_file, options.pools_file, *own, *files, *keys]))
