"""Loads a configuration with its plugin files: reads the files once, and compiles from what was read. Also reads a pools file.

The start, a trial, and every process that takes over a later configuration use these functions.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from epp.config import pools_file, registry, yaml_nodes
from epp.config.findings import ConfigError, ConfigErrors
from epp.config.load import EffectiveConfig, Surroundings, load
from epp.config.pools_file import PoolEntry, PoolsFile
from epp.config.tenants_section import key_files, keys_of
from workers.host.memory import cgroup_limit
from workers.process.generations import Bundle, GenerationLost, Given
from workers.process.instance import Instance

if TYPE_CHECKING:
    from workers.host.options import Options

CONFIG_BYTES_MAX: Final = 4 * yaml_nodes.TEXT_MAX  # at least as long as the longest text that `load` accepts, in UTF-8
PLUGIN_FILES_MAX: Final = 256
PLUGIN_BYTES_MAX: Final = 8 << 20  # limit of the sizes of all plugin files together
SUFFIX: Final = ".py"
KEYS_BYTES_MAX: Final = 4 << 20  # limit of one file of API keys, which has room for some 40,000 keys


class UnreadablePlugins(Exception):
    """Raised if the folder of --plugin-path cannot be read, or is too large."""


class PoolText(NamedTuple):
    """A configuration of a pool, in the form that `epp.config.load.load` takes. `text`: None stands for the built-in configuration."""

    text: str | None
    source: str


def names_in(folder: str, endings: str | tuple[str, ...]) -> list[str]:
    """Returns the names in a folder that end so, sorted. Skips hidden files, such as those of editors and file managers. Raises OSError."""
    return sorted(name for name in os.listdir(folder) if name.endswith(endings) and not name.startswith("."))


def read_plugins(folder: str) -> dict[str, bytes]:
    """Reads the Python files of a folder. Returns the contents of the files by name. Returns {} if `folder` is "". Raises
    UnreadablePlugins.
    """
    if not folder:
        return {}
    try:
        names = names_in(folder, SUFFIX)
        if len(names) > PLUGIN_FILES_MAX:
            raise UnreadablePlugins(f"--plugin-path {folder}: {len(names)} Python files; at most {PLUGIN_FILES_MAX}")
        found: dict[str, bytes] = {}
        left = PLUGIN_BYTES_MAX
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                found[name] = file.read(left + 1)
            left -= len(found[name])
            if left < 0:
                raise UnreadablePlugins(f"--plugin-path {folder}: more than {PLUGIN_BYTES_MAX} bytes of Python files")
    except OSError as error:
        raise UnreadablePlugins(f"--plugin-path {error.filename or folder}: {error.strerror or error}") from error
    return found


def read_keys(config: EffectiveConfig) -> tuple[dict[str, str], list[ConfigError]]:
    """Reads the files of API keys that a configuration names. Returns the texts by path, and an error for each unreadable file."""
    found: dict[str, str] = {}
    errors: list[ConfigError] = []
    for path, place in key_files(config.tenants).items():
        try:
            if os.path.exists(path) and not os.path.isfile(path):
                raise ValueError(f"the file {path} is a folder, a pipe or a device; it is read again and again, so give a file")
            found[path] = read_text(path)
        except ValueError as unreadable:
            hint = "each of its lines has a tenant and the hash of a key: docs/tenants.md"
            errors.append(ConfigError(config.source, place.line, place.column, "tenant-keys", str(unreadable), hint))
    return found, errors


def read_text(path: str, most: int = KEYS_BYTES_MAX) -> str:
    """Reads a file of text, with at most `most` bytes. Raises ValueError, which says why it cannot be read."""
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise ValueError(f"the file {path} has more than {most} bytes")
        return data.decode("utf-8-sig")
    except OSError as refused:
        raise ValueError(f"the file {path} cannot be read: {refused.strerror or refused}") from refused
    except UnicodeDecodeError as wrong:
        raise ValueError(f"the file {path} is not UTF-8 at byte {wrong.start}") from wrong


def read_pools(path: str) -> PoolsFile:
    """Reads a pools file, without the files that it names. Raises ConfigErrors."""
    try:
        text = read_text(path, CONFIG_BYTES_MAX)
    except ValueError as unreadable:
        raise ConfigErrors([ConfigError(path, 0, 0, "unreadable", str(unreadable))]) from unreadable
    return pools_file.read(text, path)


def read_configurations(file: PoolsFile) -> tuple[list[PoolText | None], list[ConfigError]]:
    """Returns the configuration of each pool, or None and an error for each configuration that cannot be read."""
    found: list[PoolText | None] = []
    errors: list[ConfigError] = []
    known: dict[str, PoolText] = {}
    for pool in file.pools:
        try:
            found.append(_pool_text(file, pool, known))
        except ValueError as unreadable:
            found.append(None)
            place = pool.config_place
            errors.append(ConfigError(file.source, place.line, place.column, "unreadable", f"pool '{pool.name}': {unreadable}"))
    return found, errors


def read_configuration(file: PoolsFile, pool: PoolEntry) -> PoolText:
    """Returns the configuration of one pool. Raises ValueError if the configuration cannot be read."""
    return _pool_text(file, pool, {})


def _pool_text(file: PoolsFile, pool: PoolEntry, known: dict[str, PoolText]) -> PoolText:
    """Returns the configuration of a pool. `known`: the texts of the files that were read already, by path. Raises ValueError."""
    if pool.config is not None:
        # The empty lines make errors name the line in the pools file, where the text follows a `|`.
        return PoolText("\n" * pool.config_place.line + pool.config, file.source)
    if not pool.config_file:
        return PoolText(None, "")
    path = os.path.join(os.path.dirname(file.source), pool.config_file)
    if path not in known:
        known[path] = PoolText(read_text(path, CONFIG_BYTES_MAX), path)
    return known[path]


def with_keys(config: EffectiveConfig, texts: Mapping[str, str] | None = None) -> EffectiveConfig:
    """Returns the configuration with its API keys. `texts`: the texts of the key files; None: reads the files. Raises ConfigErrors."""
    if config.tenants is None:
        return config
    if texts is None:
        texts, errors = read_keys(config)
        if errors:
            raise ConfigErrors(errors)
    return replace(config, keys=keys_of(texts))


def surroundings_of(options: "Options") -> Surroundings:
    """Returns the facts about this picker that the linter needs to judge a configuration."""
    return Surroundings(
        options.scrape_interval_s, options.body_bytes_max, cgroup_limit(), leader_election=options.ha_enable_leader_election
    )


def use_plugins(folder: str, given: Given) -> None:
    """Registers the plugin files of a configuration instead of the plugin files of the last configuration. Raises PluginImportError."""
    registry.replace_sources(folder, given.plugins)


def missing_secret(options: "Options", config: EffectiveConfig) -> ConfigError | None:
    """Returns an error if the configuration has cache salts and the picker has no lasting secret."""
    place = config.tenants.salt_place if config.tenants is not None else None
    if place is None or options.prefix_secret_file or options.state_dir or options.replica_store:
        return None
    why = "tenants.cacheSalt: without a secret that lasts, each start of the picker makes other salts, and servers find nothing cached"
    fix = "give --prefix-secret-file, the same to all replicas; or --replica-store; or, for a single picker, --state-dir"
    return ConfigError(config.source, place.line, place.column, "tenants", why, fix)


def load_given(options: "Options", given: Given) -> EffectiveConfig:
    """Loads a configuration whose plugins are registered, with its API keys. Raises ConfigErrors, PluginImportError."""
    config = load(given.text, given.source, allow_experimental=options.allow_experimental_plugins, surroundings=surroundings_of(options))
    if (wrong := missing_secret(options, config)) is not None:
        raise ConfigErrors([wrong], config.warnings)
    return with_keys(config, given.keys)


def candidate(instance: Instance) -> Instance:
    """Loads the candidate. Returns this instance with the candidate's configuration.

    Raises GenerationLost, ConfigErrors, PluginImportError, StartError.
    """
    return _under(instance, instance.generations.candidate())


def _under(instance: Instance, bundle: Bundle) -> Instance:
    if bundle.pool != (instance.options.pool_name if instance.pool is not None else ""):
        raise GenerationLost(f"the place has another pool: {bundle.pool}")
    given = bundle.given
    use_plugins(instance.options.plugin_path, given)
    return instance.under(load_given(instance.options, given), bundle)


def of_pool(instance: Instance) -> Instance:
    """Returns the instance as one of several pools sees it, under its configuration in force, with plugins that no process has started.

    Raises the same exceptions as `candidate`.
    """
    with contextlib.suppress(GenerationLost):  # the configuration is of a pool that had the place before
        if instance.outdated:
            return in_force(instance)
    if instance.bundle is None:
        raise GenerationLost("the pool has no configuration")
    given = instance.bundle.given
    if given.plugins:
        use_plugins(instance.options.plugin_path, given)
    return replace(instance, config=load_given(instance.options, given))


def in_force(instance: Instance) -> Instance:
    """Returns this instance with the configuration in force. Loads the configuration if this instance has another one.

    Raises the same exceptions as `candidate`.
    """
    while instance.outdated:
        instance = _under(instance, instance.generations.current())
    return instance
