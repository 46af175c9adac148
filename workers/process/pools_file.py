"""Reads a pools file, and the texts of the configurations that it names."""

import os
from typing import NamedTuple

from epp.config import pools
from epp.config.findings import ConfigError, ConfigErrors
from epp.config.pools import PoolEntry, PoolsFile
from workers.process.loading import CONFIG_BYTES_MAX, read_text


class PoolText(NamedTuple):
    """A configuration of a pool, as `epp.config.load.load` takes it. `text`: None stands for the built-in one."""

    text: str | None
    source: str


def read_pools(path: str) -> PoolsFile:
    """Reads a pools file, without the files that it names. Raises ConfigErrors."""
    try:
        text = read_text(path, CONFIG_BYTES_MAX)
    except ValueError as unreadable:
        raise ConfigErrors([ConfigError(path, 0, 0, "unreadable", str(unreadable))]) from unreadable
    return pools.read(text, path)


def read_configurations(file: PoolsFile) -> tuple[list[PoolText | None], list[ConfigError]]:
    """Returns the configuration of each pool, and an error for each that cannot be read; then there is None in its place."""
    found: list[PoolText | None] = []
    errors: list[ConfigError] = []
    known: dict[str, PoolText] = {}
    for pool in file.pools:
        try:
            found.append(_read(file, pool, known))
        except ValueError as unreadable:
            found.append(None)
            place = pool.config_place
            errors.append(ConfigError(file.source, place.line, place.column, "unreadable", f"pool '{pool.name}': {unreadable}"))
    return found, errors


def read_configuration(file: PoolsFile, pool: PoolEntry) -> PoolText:
    """Returns the configuration of one pool. Raises ValueError if it cannot be read."""
    return _read(file, pool, {})


def _read(file: PoolsFile, pool: PoolEntry, known: dict[str, PoolText]) -> PoolText:
    """Returns the configuration of a pool. `known`: the files that were read, by path. Raises ValueError."""
    if pool.config is not None:
        # The empty lines make errors name the line in the pools file, where the text follows a `|`.
        return PoolText("\n" * pool.config_place.line + pool.config, file.source)
    if not pool.config_file:
        return PoolText(None, "")
    path = os.path.join(os.path.dirname(file.source), pool.config_file)
    if path not in known:
        known[path] = PoolText(read_text(path, CONFIG_BYTES_MAX), path)
    return known[path]
