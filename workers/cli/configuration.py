"""A configuration from a file or a flag: read, loaded, and its findings shown.

Whatever is wrong with it ends the command with exit code 78, all errors told.
"""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import click

from epp import registry, yaml_nodes
from epp.config import ConfigErrors, EffectiveConfig, Surroundings, load
from epp.findings import ConfigError, ConfigWarning, Finding
from epp.registry import PluginImportError
from workers.cli.flags import BadConfiguration, flag
from workers.cli.options import PLUGIN_PATH, Options
from workers.memory import cgroup_limit
from workers.objects import Folder
from workers.yaml_files import DiscoveryError

F = TypeVar("F", bound=Callable[..., Any])

STDIN = "-"
NAME_MAX = 253
NAMESPACE = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
NAME = re.compile(r"[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?")
BYTES_MAX = 4 * yaml_nodes.TEXT_MAX  # of UTF-8; `load` refuses what is too long


class Unreadable(BadConfiguration):
    """A file that could not be read, as a finding too."""

    def __init__(self, path: str, why: str) -> None:
        self.finding = ConfigError(path, 0, 0, "unreadable", why)
        super().__init__(str(self.finding))


def read_bytes(path: str, most: int = -1) -> bytes:
    """What is in a file, or on standard input for `-`; no more than `most` bytes of it, if that is given."""
    try:
        if path != STDIN:
            with open(path, "rb") as file:
                return file.read(most)
        if sys.stdin is None:
            raise Unreadable(path, "standard input is closed")
        return sys.stdin.buffer.read(most)
    except OSError as error:
        raise Unreadable(path, error.strerror or str(error)) from error


def read_file(path: str) -> str:
    """The text of a file, or of standard input for `-`."""
    try:
        return read_bytes(path, BYTES_MAX + 1).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(path, f"not UTF-8 at byte {error.start}") from error


def plugin_path_option(command: F) -> F:
    """Gives a command the flag that `epp serve` has for plugins of one's own."""
    return flag("plugin-path", str, "", PLUGIN_PATH)(command)


def add_plugins(folder: str) -> None:
    """The plugin types of a folder's Python files, or the end of the command. No folder: nothing."""
    if not folder:
        return
    try:
        os.listdir(folder)
    except OSError as error:
        raise BadConfiguration(f"--plugin-path {folder}: {error.strerror or error}") from error
    try:
        with without_threads():
            registry.add_folder(folder)
    except PluginImportError as error:
        raise BadConfiguration(f"--plugin-path: {error}") from error


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    """The end of the command where plugins start one: the picker could not fork any more."""
    before = set(threading.enumerate())
    yield
    if begun := set(threading.enumerate()) - before:
        names = ", ".join(sorted(thread.name for thread in begun))
        raise BadConfiguration(
            f"error[thread]: a plugin has started a thread ({names}) at its import or in its constructor, which run before the fork: "
            "do so in `start`"
        )


def load_text(text: str, source: str, *, allow_experimental: bool, around: Surroundings) -> EffectiveConfig:
    """The configuration, or the end of the command."""
    try:
        with without_threads():
            return load(text, source, allow_experimental=allow_experimental, around=around)
    except ConfigErrors as errors:
        raise BadConfiguration(told([*errors.warnings, *errors.errors])) from errors
    except PluginImportError as error:
        raise click.ClickException(str(error)) from error


def object_findings(folder: str) -> list[Finding]:
    """What is wrong with the objects of a folder, and what has no effect; no folder: nothing."""
    if not folder:
        return []
    remarks: list[str] = []
    wrong: Sequence[str] = ()
    try:
        Folder(folder, report=remarks.append).load()
    except DiscoveryError as failure:
        wrong = failure.faults
    return [
        *(ConfigWarning(folder, 0, 0, "odd-object", remark) for remark in remarks),
        *(ConfigError(folder, 0, 0, "bad-object", fault) for fault in wrong),
    ]


def told(findings: Iterable[Finding]) -> str:
    """One line each."""
    return "\n".join(map(str, findings))


def load_config(options: Options) -> EffectiveConfig:
    """The configuration that `epp serve` was started with. Warnings are printed.

    Endpoints come from its discovery plugin or from `--endpoints`: from one of them.
    """
    if options.config_file:
        text, source = read_file(options.config_file), options.config_file
    else:
        text, source = options.config_text, "--config-text" if options.config_text else ""
    add_plugins(options.plugin_path)
    around = Surroundings(
        options.scrape_interval_s,
        options.body_bytes_max,
        cgroup_limit(),
        leader_election=options.ha_enable_leader_election,
    )
    config = load_text(text, source, allow_experimental=options.allow_experimental_plugins, around=around)
    if config.warnings:
        click.echo(told(config.warnings), err=True)
    check_discovery(options, config)
    return config


def check_without_kubernetes(options: Options, place: str) -> None:
    """What needs a Kubernetes API, where endpoints come from some other place."""
    if options.ha_enable_leader_election:
        raise BadConfiguration(
            f"error[no-lease]: --ha-enable-leader-election needs Kubernetes, which keeps the lease, but endpoints come from {place}: "
            "remove the flag (replicas then serve side by side), or give --pool-name alone"
        )
    if options.metrics_endpoint_auth:
        click.echo(
            f"warning: --metrics-endpoint-auth has no effect: Kubernetes reviews tokens, and endpoints come from {place}; "
            "--metrics-client-ca-file asks for client certificates",
            err=True,
        )


def check_discovery(options: Options, config: EffectiveConfig) -> None:
    """Exactly one place where endpoints come from. A pool's name alone is one; beside another it is just a name."""
    places = ["--endpoints"] if options.endpoints else []
    if config.discovery is not None:
        places.append(f"plugin '{config.discovery.name}' of {config.source}")
    if options.endpoint_selector:
        places.append("--endpoint-selector")
    if len(places) > 1:
        raise BadConfiguration(
            f"error[two-discoveries]: endpoints come from {' and from '.join(places)}; give one of them"
        )
    if places and not options.endpoint_selector:
        check_without_kubernetes(options, places[0])
    if not places and not options.pool_given:
        raise BadConfiguration(
            "error[no-discovery]: no endpoints: give --endpoints host:port,..., a file-discovery plugin in dataLayer.discovery, or, "
            "in Kubernetes, --pool-name or --endpoint-selector"
        )
    if not places or options.endpoint_selector:
        check_names(options)


def check_names(options: Options) -> None:
    """What Kubernetes is asked for by name. It would answer to a wrong one that there is no such thing."""
    if not NAMESPACE.fullmatch(options.pool_namespace):
        why = "a namespace has 1 to 63 lower-case letters, digits and '-', no '-' first or last"
        raise BadConfiguration(f"error[bad-name]: --pool-namespace '{options.pool_namespace[:NAME_MAX]}': {why}")
    if options.pool_given and not (NAME.fullmatch(options.pool_name) and len(options.pool_name) <= NAME_MAX):
        why = f"a pool's name has 1 to {NAME_MAX} lower-case letters, digits, '-' and '.', a letter or digit first and last"
        raise BadConfiguration(f"error[bad-name]: --pool-name '{options.pool_name[:NAME_MAX]}': {why}")
