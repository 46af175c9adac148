"""Reads the configurations of several pools, and checks that one picker can serve them together.

`several`: the pools of --pools-file. `found`: pools that the picker finds while it runs (`workers.process.places`), with --config-dir.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import structlog

from epp.config.effective import EffectiveConfig
from epp.config.findings import WHOLE, ConfigError, Place
from epp.config.pools_file import PoolEntry, PoolsFile
from epp.plugins.producers._precise_params import Settings
from workers.cli.configuration import (
    check_endpoints,
    check_kubernetes,
    check_names,
    check_objects,
    findings_text,
    load_config,
    plugin_files,
    read_file,
    read_given,
    refusing_errors,
    with_one_worker,
)
from workers.cli.flags import BadConfiguration
from workers.cli.output import echo, echo_text
from workers.host.options import Options
from workers.process import pool_views
from workers.process.generations import Given
from workers.process.instance import FIRST, Instance
from workers.process.loading import PoolText, names_in, read_configurations, read_pools
from workers.process.places import DEFAULT, Places, Pool
from workers.process.pool_list import SPARE, listed
from workers.process.pool_views import kv_events_differ
from workers.process.sources import Sources
from workers.supervisor.endpoints.discovery import parse_flag
from workers.supervisor.kube.object_kinds import PoolName

ENDPOINTS_USUAL = 64  # endpoints of a pool without a limit of its own
FAULTS_SHOWN_MAX = 20
SUFFIX: Final = ".yaml"
FILES_MAX: Final = 1000
PLACES_USUAL: Final = 32  # places for ports that are opened while the picker runs

log = structlog.get_logger()


def several(options: Options) -> Callable[[], Instance]:
    """Reads and checks the pools of --pools-file. Returns a function that creates their instance. Raises BadConfiguration."""
    file = read(options)
    texts, unread = read_configurations(file)
    if unread:
        raise BadConfiguration(findings_text(unread))
    if file.warnings:
        echo_text(findings_text(file.warnings), err=True)
    check_objects(options.objects_dir, object_names(file, options))
    found = _loaded(options, file, [text for text in texts if text is not None])
    for each in found:
        options = with_one_worker(options, each.config)
    pairs = enumerate(zip(file.pools, found, strict=True))
    pool_list = {place: listed(file.source, entry, each.max_endpoints, FIRST) for place, (entry, each) in pairs}
    usual = next((entry.max_endpoints for entry in file.pools if entry.max_endpoints), ENDPOINTS_USUAL)
    spare = found[0]._replace(name="", endpoints="", kube=None, max_endpoints=min(usual, ENDPOINTS_USUAL))
    every = [*found, *[spare] * SPARE]
    most = sum(each.max_endpoints for each in every)
    objects = any(each.kube is not None and each.kube.name for each in found)
    options = msgspec.structs.replace(options, max_endpoints=most, pool_given=objects)
    log.info(
        "pools", count=len(found), file=options.pools_file, configurations=len({id(each.config) for each in found}), endpoints_max=most
    )
    ports = {entry.port: entry.name for entry in file.pools if entry.port}
    return lambda: pool_views.create(options, every, file.choice(), ports, pool_list=pool_list)


def found(options: Options) -> Callable[[], Instance]:
    """Reads and checks the configurations of --config-dir. Returns a function that creates the instance. Raises BadConfiguration."""
    names, ports = options.pool_names, options.pool_ports or (0,) * PLACES_USUAL
    for name in names or ("",):
        check_names(options.pool_namespace, name or None)
    most = options.max_endpoints if "max_endpoints" in options.given else ENDPOINTS_USUAL
    # None of the pools gives its name to the picker.
    options = msgspec.structs.replace(options, pool_name="epp", max_endpoints=most * len(ports), pool_given=True)
    check_objects(options.objects_dir)
    configurations = _configurations(options, names, most)
    for each in configurations.values():
        options = with_one_worker(options, each.config)
    places = Places(configurations, ports, options.service_name, names)
    shown = {"places": len(ports), "ports": options.pool_ports, "configurations": sorted(configurations)}
    log.info("pools", service=options.service_name, names=names, **shown)
    return lambda: pool_views.create_places(options, places)


def _configurations(options: Options, names: Sequence[str], most: int) -> Mapping[str, Pool]:
    """Loads the files of --config-dir by the names of their pools. Without a default.yaml, the flags name the default configuration."""
    texts = texts_by_name(options, names)
    configurations: dict[str, Pool] = {}
    faults: list[str] = []
    beside = Beside()
    for name, given in texts.items():
        try:
            config = load_config(options, given)
            check_kubernetes(options, config)
        except BadConfiguration as wrong:
            faults.append(wrong.message)
            continue
        if (bad := beside.unfit(config.source, name, WHOLE, options, config)) is not None:
            faults.append(str(bad))
        configurations[name] = Pool(name, given, config, "", most)
    if faults:
        raise BadConfiguration("\n".join(faults))
    return configurations


def texts_by_name(options: Options, named: Sequence[str]) -> Mapping[str, Given]:
    """Reads the files of --config-dir. Raises BadConfiguration, also if a pool of --pool-name has no configuration."""
    folder, plugins = options.config_dir, plugin_files(options.plugin_path)
    if not folder:
        return {DEFAULT: read_given(options)}
    try:
        files = names_in(folder, SUFFIX)
    except OSError as refused:
        raise BadConfiguration(f"error: --config-dir {folder}: {refused.strerror or refused}") from refused
    if len(files) > FILES_MAX:
        raise BadConfiguration(f"error: --config-dir {folder}: {len(files)} files; at most {FILES_MAX}")
    names = [file.removesuffix(SUFFIX) for file in files]
    has_default = DEFAULT in names
    if lacking := [name for name in named if name not in names and not has_default]:
        missing = ", ".join(f"{name}{SUFFIX}" for name in lacking)
        raise BadConfiguration(f"error: --config-dir {folder}: there is neither {missing} nor {DEFAULT}{SUFFIX}")
    for name in names:
        if named and name not in (*named, DEFAULT):
            echo(f"warning: --config-dir {folder}: {name}{SUFFIX} has no effect: no --pool-name has this name", err=True)
    texts = {name: Given(read_file(path := os.path.join(folder, f"{name}{SUFFIX}")), path, plugins) for name in names}
    return texts if has_default else {**texts, DEFAULT: read_given(options)}


def read(options: Options) -> PoolsFile:
    """Reads the file of --pools-file. Raises BadConfiguration."""
    with refusing_errors():
        file = read_pools(options.pools_file)
        file.check_ports(taken(options))
    return file


def taken(options: Options) -> dict[int, str]:
    """Returns the ports that no pool can have, with their flags. A pool may share the gRPC port of the picker."""
    return {options.grpc_health_port: "--grpc-health-port", options.metrics_port: "--metrics-port", options.grpc_port: "--grpc-port"}


def object_names(file: PoolsFile, options: Options) -> list[PoolName]:
    """Returns the names that stand for the pools in objectives and rewrites."""
    own = (entry.kube.name if entry.kube is not None else "" for entry in file.pools)
    return [PoolName(name or entry.name, options.pool_group) for name, entry in zip(own, file.pools, strict=True)]


def own_options(options: Options, entry: PoolEntry) -> Options:
    """Returns the options of one pool."""
    endpoints = ",".join(entry.endpoints)
    return pool_views.options_of(options, entry.name, endpoints, entry.max_endpoints or _endpoints_of(endpoints), entry.kube)


class Beside:
    """Checks that pools fit together, one pool after the other."""

    def __init__(self) -> None:
        self._precise: tuple[str, Settings] | None = None  # the first pool with a precise prefix producer

    def unfit(self, file: str, name: str, place: Place, options: Options, config: EffectiveConfig) -> ConfigError | None:
        """Returns why a pool cannot have this configuration beside the earlier pools, or None if it can. `options`: the options of the
        pool.

        `file`, `place`: where the pool is given.
        """
        settings, before = Sources(options, config).kv_events, self._precise
        if settings is not None and before is None:
            self._precise = name, settings
        differs = ""
        if settings is not None and before is not None and (setting := kv_events_differ(before[1], settings)):
            differs = f"{setting} differs from that of pool '{before[0]}'"
        return unfit(file, name, place, options, config, differs)


def unfit(file: str, name: str, place: Place, options: Options, config: EffectiveConfig, differs: str = "") -> ConfigError | None:
    """Returns why a pool cannot have this configuration. `differs`: the setting that must equal that of another pool, but differs."""
    why, hint, rule = "", "give both the same, or the pool a picker of its own", "one-pool"
    if differs:
        why = f"one process follows the KV events of all pools, and {differs}"
    elif options.pool_given and config.discovery is not None:
        plugin = f"plugin '{config.discovery.name}' of {config.source}"
        why, hint, rule = f"endpoints come from {plugin} and from an InferencePool", "give only one of them", "two-discoveries"
    return ConfigError(file, place.line, place.column, rule, f"pool '{name}': {why}", hint) if why else None


def _loaded(options: Options, file: PoolsFile, texts: Sequence[PoolText]) -> list[Pool]:
    """Loads the configuration of each pool, equal configurations only once. Raises BadConfiguration with the faults of all pools."""
    plugins = plugin_files(options.plugin_path)
    known: dict[tuple[PoolText, bool, bool], EffectiveConfig] = {}
    found: list[Pool] = []
    faults: list[str] = []
    beside = Beside()
    for entry, text in zip(file.pools, texts, strict=True):
        given = Given(text.text, text.source, plugins)
        own = own_options(options, entry)
        try:
            key = text, bool(own.endpoints), entry.kube is not None
            if key not in known:
                known[key] = load_config(own, given)
            if (wrong := beside.unfit(file.source, entry.name, entry.place, own, known[key])) is not None:
                faults.append(str(wrong))
                continue
            check_endpoints(own, known[key])
            check_kubernetes(own, known[key])
        except BadConfiguration as bad:
            faults.append(f"{_place(file, entry)}: pool '{entry.name}': {bad.message}")
            continue
        found.append(Pool(entry.name, given, known[key], own.endpoints, own.max_endpoints, entry.kube))
    if faults:
        more = [f"{len(faults) - FAULTS_SHOWN_MAX} more pools have errors"] if len(faults) > FAULTS_SHOWN_MAX else []
        raise BadConfiguration("\n".join([*faults[:FAULTS_SHOWN_MAX], *more]))
    return found


def _endpoints_of(endpoints: str) -> int:
    """Returns the number of endpoints for which a pool has room: twice the number of listed endpoints, if all are addresses."""
    entries = parse_flag(endpoints) if endpoints else []
    return 2 * len(entries) if entries and all(entry.is_address for entry in entries) else ENDPOINTS_USUAL


def _place(file: PoolsFile, entry: PoolEntry) -> str:
    place: Place = entry.place
    return f"{file.source}:{place.line}" if place.line else file.source
