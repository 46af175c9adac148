"""Reads the file of --pools-file with all configurations that it names, and checks that one picker can serve them together."""

from collections.abc import Callable, Sequence

import msgspec
import structlog

from epp.config.effective import EffectiveConfig
from epp.config.findings import ConfigError, Place
from epp.config.pools import PoolEntry, PoolsFile
from epp.plugins.producers._precise_params import Settings
from workers.cli.configuration import (
    check_endpoints,
    check_kubernetes,
    check_objects,
    findings_text,
    load_config,
    plugin_files,
    refusing_errors,
    with_one_worker,
)
from workers.cli.flags import BadConfiguration
from workers.cli.output import echo_text
from workers.host.options import Options
from workers.process import pools
from workers.process.generations import Given
from workers.process.instance import FIRST, Instance
from workers.process.loading import PoolText, read_configurations, read_pools
from workers.process.places import Pool
from workers.process.pool_list import SPARE, listed
from workers.process.pools import kv_events_differ
from workers.process.sources import Sources
from workers.supervisor.endpoints.discovery import parse_flag
from workers.supervisor.kube.object_kinds import PoolName

ENDPOINTS_USUAL = 64  # of a pool that says nothing else
FAULTS_SHOWN_MAX = 20

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
    return lambda: pools.create(options, every, file.choice(), ports, pool_list=pool_list)


def read(options: Options) -> PoolsFile:
    """Reads the file of --pools-file. Raises BadConfiguration."""
    with refusing_errors():
        file = read_pools(options.pools_file)
        file.check_ports(taken(options))
    return file


def taken(options: Options) -> dict[int, str]:
    """Returns the ports that no pool can have, with their flags. The gRPC port of the picker may be that of a pool that shares it."""
    return {options.grpc_health_port: "--grpc-health-port", options.metrics_port: "--metrics-port", options.grpc_port: "--grpc-port"}


def object_names(file: PoolsFile, options: Options) -> list[PoolName]:
    """Returns the names with which objectives and rewrites mean the pools."""
    own = (entry.kube.name if entry.kube is not None else "" for entry in file.pools)
    return [PoolName(name or entry.name, options.pool_group) for name, entry in zip(own, file.pools, strict=True)]


def own_options(options: Options, entry: PoolEntry) -> Options:
    """Returns the options as they hold for one pool."""
    endpoints = ",".join(entry.endpoints)
    return pools.options_of(options, entry.name, endpoints, entry.max_endpoints or _endpoints_of(endpoints), entry.kube)


class Beside:
    """Checks that pools fit beside each other, one after the other."""

    def __init__(self) -> None:
        self._precise: tuple[str, Settings] | None = None  # the first pool with a precise prefix producer

    def unfit(self, file: str, name: str, place: Place, options: Options, config: EffectiveConfig) -> ConfigError | None:
        """Returns why a pool cannot have this configuration beside the pools before; None if it can. `options`: its own.

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
    """Returns why a pool cannot have this configuration. `differs`: what differs from another pool although it must be equal."""
    why, hint, rule = "", "give both the same, or the pool a picker of its own", "one-pool"
    if differs:
        why = f"one process follows the KV events of all pools, and {differs}"
    elif options.pool_given and config.discovery is not None:
        plugin = f"plugin '{config.discovery.name}' of {config.source}"
        why, hint, rule = f"endpoints come from {plugin} and from an InferencePool", "give only one of them", "two-discoveries"
    return ConfigError(file, place.line, place.column, rule, f"pool '{name}': {why}", hint) if why else None


def _loaded(options: Options, file: PoolsFile, texts: Sequence[PoolText]) -> list[Pool]:
    """Loads the configuration of each pool: equal ones once. Raises BadConfiguration with the faults of all pools."""
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
    """Returns for how many endpoints a pool has room: twice as many as it lists, if all are addresses."""
    entries = parse_flag(endpoints) if endpoints else []
    return 2 * len(entries) if entries and all(entry.is_address for entry in entries) else ENDPOINTS_USUAL


def _place(file: PoolsFile, entry: PoolEntry) -> str:
    place: Place = entry.place
    return f"{file.source}:{place.line}" if place.line else file.source
