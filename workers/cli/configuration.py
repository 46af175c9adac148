"""Reads and loads a configuration from a file or a flag, and shows its findings.

An invalid configuration ends the command with exit code 78 and shows all errors.
"""

import contextlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import click
import msgspec

from epp.config import registry
from epp.config.findings import ConfigError, ConfigWarning, Finding
from epp.config.load import ConfigErrors, EffectiveConfig, Surroundings, load
from epp.config.registry import PluginImportError
from epp.config.tenants_section import keys_of
from epp.plugins.discovery import FileDiscovery
from workers.cli.flags import BOOL, BadConfiguration, flag
from workers.cli.output import echo, echo_text
from workers.cli.serve_flags import EXPERIMENTAL, PLUGIN_PATH
from workers.host.options import Options
from workers.host.printable import printable
from workers.host.yaml_files import DiscoveryError
from workers.process.generations import Given
from workers.process.loading import CONFIG_BYTES_MAX, UnreadablePlugins, load_given, read_keys, read_plugins, use_plugins
from workers.process.sources import Sources
from workers.supervisor.endpoints.discovery import parse_flag
from workers.supervisor.endpoints.endpoints_file import File
from workers.supervisor.kube.api import CLIENT, kubeconfig_files, ready_to_connect
from workers.supervisor.kube.object_files import Folder
from workers.supervisor.kube.object_kinds import PoolName

F = TypeVar("F", bound=Callable[..., Any])

STDIN = "-"
NAME_MAX = 253
NAMESPACE = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
NAME = re.compile(r"[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?")
# Flags of `epp serve` that other commands share.
plugin_path_option: Callable[[F], F] = flag("plugin-path", str, "", PLUGIN_PATH)
experimental_option: Callable[[F], F] = flag("allow-experimental-plugins", BOOL, "false", EXPERIMENTAL)


def shown_path(path: str) -> str:
    """Returns a file's path in the form that messages show."""
    return "<stdin>" if path == STDIN else path


class Unreadable(BadConfiguration):
    """Raised if a file cannot be read. `finding`: the same error as a Finding."""

    def __init__(self, path: str, why: str) -> None:
        self.finding = ConfigError(shown_path(path), 0, 0, "unreadable", why)
        super().__init__(str(self.finding))


def read_bytes(path: str, limit: int = -1) -> bytes:
    """Reads a file, or standard input for `-`: at most `limit` bytes if a limit is given. Raises Unreadable."""
    try:
        if path != STDIN:
            with open(path, "rb") as file:
                return file.read(limit)
        if sys.stdin is None:
            raise Unreadable(path, "standard input is closed")
        return sys.stdin.buffer.read(limit)
    except OSError as error:
        raise Unreadable(path, error.strerror or str(error)) from error


def read_file(path: str) -> str:
    """Reads the text of a file, or of standard input for `-`. Raises Unreadable."""
    try:
        return read_bytes(path, CONFIG_BYTES_MAX + 1).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(path, f"not UTF-8 at byte {error.start}") from error


def add_plugins(folder: str) -> None:
    """Registers the plugin types of a folder's Python files. Does nothing if `folder` is empty. Raises BadConfiguration."""
    if not folder:
        return
    plugins = plugin_files(folder)
    try:
        with without_threads():
            registry.add_sources(folder, plugins)
    except PluginImportError as error:
        raise BadConfiguration(f"--plugin-path: {error}") from error


def plugin_files(folder: str) -> dict[str, bytes]:
    """Reads the Python files of a folder. Returns their contents by name. Raises BadConfiguration."""
    try:
        return read_plugins(folder)
    except UnreadablePlugins as error:
        raise BadConfiguration(str(error)) from error


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    """Refuses plugins that start a thread in this block, because a process with threads cannot fork safely. Raises BadConfiguration."""
    before = set(threading.enumerate())
    yield
    if started := set(threading.enumerate()) - before:
        names = ", ".join(sorted(thread.name for thread in started))
        raise BadConfiguration(
            f"error[thread]: a plugin started a thread ({names}) at its import or in its constructor, which run before the fork; "
            "start it in the plugin's start method"
        )


@contextlib.contextmanager
def refusing_errors() -> Iterator[None]:
    """Turns ConfigErrors in this block into BadConfiguration, with the warnings."""
    try:
        yield
    except ConfigErrors as errors:
        raise BadConfiguration(findings_text([*errors.warnings, *errors.errors])) from errors


def load_text(text: str | None, source: str, *, allow_experimental: bool, surroundings: Surroundings) -> EffectiveConfig:
    """Loads a configuration; if None is given, the built-in one. Raises BadConfiguration, or ClickException for a broken installation."""
    try:
        with refusing_errors(), without_threads():
            return load(text, source, allow_experimental=allow_experimental, surroundings=surroundings)
    except PluginImportError as error:
        raise click.ClickException(str(error)) from error


def key_findings(config: EffectiveConfig) -> list[Finding]:
    """Checks the API keys of a configuration. Returns a warning for each unreadable file of keys. Raises ConfigErrors.

    A machine that checks a configuration need not have the keys.
    """
    texts, unread = read_keys(config)
    keys_of(texts)
    return [ConfigWarning(each.file, each.line, each.column, "keys-unread", each.message, "epp serve needs it") for each in unread]


def object_findings(folder: str, pools: Sequence[PoolName] = ()) -> list[Finding]:
    """Returns errors and warnings about the objects in a folder. Returns [] if `folder` is "". `pools`: the names of several pools."""
    if not folder:
        return []
    remarks: list[str] = []
    faults: Sequence[str] = ()
    try:
        _load_objects(folder, lambda _event, place, reason: remarks.append(f"{place}: {reason}"), pools)
    except DiscoveryError as failure:
        faults = failure.faults
    return [
        *(ConfigWarning(folder, 0, 0, "odd-object", remark) for remark in remarks),
        *(ConfigError(folder, 0, 0, "bad-object", fault) for fault in faults),
    ]


def _load_objects(folder: str, report: Callable[..., None], pools: Sequence[PoolName]) -> None:
    Folder(folder, report, pools or None).load()


def findings_text(findings: Iterable[Finding]) -> str:
    """Returns the findings as text, one line each."""
    return "\n".join(printable(str(finding)) for finding in findings)


def read_given(options: Options) -> Given:
    """Reads the configuration of `epp serve` and its plugin files. Raises BadConfiguration."""
    plugins = plugin_files(options.plugin_path)
    if options.config_file:
        return Given(read_file(options.config_file), shown_path(options.config_file), plugins)
    if options.config_text:
        return Given(options.config_text, "--config-text", plugins)
    return Given(None, "", plugins)


def load_config(options: Options, given: Given | None = None) -> EffectiveConfig:
    """Loads the configuration of `epp serve` and prints its warnings. `given`: the configuration as read; if None, reads it first.

    Checks that endpoints come from exactly one source. Raises BadConfiguration.
    """
    given = given or read_given(options)
    try:
        with without_threads():
            use_plugins(options.plugin_path, given)
        with refusing_errors(), without_threads():
            config = load_given(options, given)
    except PluginImportError as error:
        raise BadConfiguration(f"--plugin-path: {error}") from error
    if config.warnings:
        echo_text(findings_text(config.warnings), err=True)
    check_discovery(options, config)
    if missing := missing_packages(options, config):
        raise BadConfiguration(findings_text(missing))
    return config


def missing_packages(options: Options, config: EffectiveConfig) -> list[ConfigError]:
    """Returns an error for each package that is not installed although a picker with these options and this configuration needs it.

    Does not check the packages of plugins, which their constructors check. Manifests for a pod do not call this, because its image has its
    own packages.
    """
    sources = Sources(options, config)
    needs = (
        (sources.kv_events is not None, "zmq", "a precise prefix producer needs the package pyzmq", "kv-events"),
        (sources.in_kubernetes, CLIENT, "Kubernetes needs the package kubernetes-asyncio", "k8s"),
        (bool(options.replica_store), "redis", "--replica-store needs the package redis", "replicas"),
        (options.transport == "grpcio", "grpc", "--transport grpcio needs the package grpcio", "grpcio"),
    )
    return [
        ConfigError(config.source, 0, 0, "missing-package", f"{what}, which is not installed", f"pip install 'endpoint-picker[{extra}]'")
        for needed, module, what, extra in needs
        if needed and importlib.util.find_spec(module) is None
    ]


def with_one_worker(options: Options, config: EffectiveConfig) -> Options:
    """If a plugin keeps its state in one worker, prints a notice and returns the options with a single worker. Else returns `options`."""
    whole = [plugin.name for plugin in config.pipeline.plugins.values() if plugin.one_worker]
    if not whole or (options.workers, options.workers_max) == (1, 1):
        return options
    if options.workers > 1:
        why = f"plugin '{whole[0]}' keeps its state in one worker"
        echo(f"notice: {why}: the picker runs with 1 worker instead of {options.workers}", err=True)
    return msgspec.structs.replace(options, workers=1, workers_max=1)


def check_without_kubernetes(options: Options, place: str) -> None:
    """Refuses flags that need Kubernetes, or warns of them, because endpoints come from `place`: a flag or a plugin."""
    if options.ha_enable_leader_election:
        raise BadConfiguration(
            f"error[no-lease]: --ha-enable-leader-election needs Kubernetes, which keeps the lease, but endpoints come from {place}: "
            "remove the flag (all replicas serve then), or give only --pool-name"
        )
    if options.metrics_endpoint_auth:
        echo(
            f"warning: --metrics-endpoint-auth has no effect: only Kubernetes can review tokens, but endpoints come from {place}; "
            "use --metrics-client-ca-file to require client certificates",
            err=True,
        )
    if options.debug_port_forward:
        why = f"endpoints come from {place}, so loopback needs no token"
        echo(f"warning: --debug-port-forward has no effect: {why}", err=True)


def check_discovery(options: Options, config: EffectiveConfig) -> None:
    """Checks that endpoints come from one source. --pool-name names a source only without another source.

    --endpoints replaces the discovery plugin of a configuration, with a notice. So each file in `deploy/config` runs with any servers.
    """
    places = ["--endpoints"] if options.endpoints else []
    if config.discovery is not None:
        plugin = f"plugin '{config.discovery.name}' of {config.source}"
        if options.endpoints:
            echo(f"notice: --endpoints replaces {plugin}, which is not read", err=True)
        else:
            places.append(plugin)
    if options.endpoint_selector:
        places.append("--endpoint-selector")
    if len(places) > 1:
        raise BadConfiguration(f"error[two-discoveries]: endpoints come from {' and from '.join(places)}; give only one of them")
    if places and not options.endpoint_selector:
        check_without_kubernetes(options, places[0])
    if not places and not options.pool_given:
        raise BadConfiguration(
            "error[no-discovery]: there is no source of endpoints: give --endpoints host:port,..., a file-discovery plugin in "
            "dataLayer.discovery.endpoints, or, in Kubernetes, --pool-name or --endpoint-selector"
        )
    if not places or options.endpoint_selector:
        check_names(options.pool_namespace, options.pool_name if options.pool_given else None)


def check_names(namespace: str, pool: str | None) -> None:
    """Checks the form of names. For an invalid name, Kubernetes would only answer that there is no such object."""
    if not NAMESPACE.fullmatch(namespace):
        why = "a namespace has 1 to 63 lower-case letters, digits and '-', but no '-' first or last"
        raise BadConfiguration(f"error[bad-name]: --pool-namespace '{namespace[:NAME_MAX]}': {why}")
    if pool is not None and not (NAME.fullmatch(pool) and len(pool) <= NAME_MAX):
        why = f"a pool's name has 1 to {NAME_MAX} lower-case letters, digits, '-' and '.', a letter or digit first and last"
        raise BadConfiguration(f"error[bad-name]: --pool-name '{pool[:NAME_MAX]}': {why}")


def check_kubernetes(options: Options, config: EffectiveConfig) -> None:
    """Checks the credentials for the API server if endpoints come from Kubernetes. This is checked only at the start. Raises
    BadConfiguration.

    A running picker has credentials already, and expired credentials may be replaced at any time. So a reload does not depend on
    credentials.
    """
    if not Sources(options, config).in_kubernetes:
        return
    from workers.supervisor.kube.credentials import check_credentials  # late: not all pickers need it

    try:
        check_credentials(kubeconfig_files(os.environ))
    except ValueError as error:
        raise BadConfiguration(f"error: Kubernetes: {error}") from error


def check_endpoints(options: Options, config: EffectiveConfig) -> None:
    """Checks endpoints and objects as the supervisor does at its first start. Raises BadConfiguration."""
    try:
        if options.endpoints:
            parse_flag(options.endpoints)
        elif isinstance(config.discovery, FileDiscovery):
            File(config.discovery.path, report=lambda *_, **_fields: None).load()
        elif config.discovery is None:
            ready_to_connect(os.environ)
    except (DiscoveryError, ValueError) as error:
        raise BadConfiguration(f"{error}") from error


def check_objects(folder: str, pools: Sequence[PoolName] = ()) -> None:
    """Checks the objects in a folder as the supervisor does at its first start. Raises BadConfiguration. `pools`: the names of several
    pools.
    """
    if not folder:
        return
    try:
        _load_objects(folder, lambda *_, **_fields: None, pools)
    except DiscoveryError as error:
        raise BadConfiguration(f"{error}") from error
