"""Loads a configuration with its plugin files: reads the files once, and compiles from what was read.

The start, a trial, and every process that takes over a later configuration use these functions.
"""

import os
from typing import TYPE_CHECKING, Final, NamedTuple

from epp.config import registry, yaml_nodes
from epp.config.load import EffectiveConfig, Surroundings, load
from workers.host.memory import cgroup_limit
from workers.process.generations import Bundle
from workers.process.instance import Instance

if TYPE_CHECKING:
    from workers.host.options import Options

CONFIG_BYTES_MAX: Final = 4 * yaml_nodes.TEXT_MAX  # no shorter than the longest text that `load` accepts, in UTF-8
PLUGIN_FILES_MAX: Final = 256
PLUGIN_BYTES_MAX: Final = 8 << 20  # limit of the sizes of all plugin files together
SUFFIX: Final = ".py"


class Given(NamedTuple):
    """A configuration as it was read. `text`: its YAML; None stands for the built-in configuration. `plugins`: the plugin files by name."""

    text: str | None
    source: str
    plugins: dict[str, bytes]


class UnreadablePlugins(Exception):
    """The folder of --plugin-path cannot be read, or has too much in it."""


def read_plugins(folder: str) -> dict[str, bytes]:
    """Reads the Python files of a folder. Returns their contents by name; nothing if `folder` is "". Raises UnreadablePlugins."""
    if not folder:
        return {}
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))
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
        raise UnreadablePlugins(f"--plugin-path {folder}: {error.strerror or error}") from error
    return found


def surroundings_of(options: "Options") -> Surroundings:
    """Returns what the linter has to know about this picker to judge a configuration."""
    return Surroundings(
        options.scrape_interval_s, options.body_bytes_max, cgroup_limit(), leader_election=options.ha_enable_leader_election
    )


def use_plugins(folder: str, given: Given) -> None:
    """Registers the plugin files of a configuration instead of those of the last one. Raises PluginImportError."""
    registry.replace_sources(folder, given.plugins)


def load_given(options: "Options", given: Given) -> EffectiveConfig:
    """Loads a configuration whose plugins are registered. Raises ConfigErrors, PluginImportError."""
    return load(given.text, given.source, allow_experimental=options.allow_experimental_plugins, surroundings=surroundings_of(options))


def candidate(instance: Instance) -> Instance:
    """Loads the candidate that is tried. Returns this instance with it.

    Raises GenerationLost, ConfigErrors, PluginImportError, StartError.
    """
    return _under(instance, instance.generations.candidate())


def _under(instance: Instance, bundle: Bundle) -> Instance:
    given = Given(bundle.text, bundle.source, bundle.plugins)
    use_plugins(instance.options.plugin_path, given)
    return instance.under(load_given(instance.options, given), bundle)


def in_force(instance: Instance) -> Instance:
    """Returns this instance with the configuration in force. Loads it if this instance has another one.

    Raises the same exceptions as `candidate`.
    """
    while instance.outdated:
        instance = _under(instance, instance.generations.current())
    return instance
