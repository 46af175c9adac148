"""Reads the configurations of --config-dir, for a picker that finds its pools while it runs (`workers.process.places`)."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import structlog

from epp.config.findings import WHOLE
from workers.cli.configuration import (
    check_kubernetes,
    check_names,
    check_objects,
    load_config,
    plugin_files,
    read_file,
    read_given,
    with_one_worker,
)
from workers.cli.flags import BadConfiguration
from workers.cli.output import echo
from workers.cli.pools import ENDPOINTS_USUAL, Beside
from workers.host.options import Options
from workers.process.generations import Given
from workers.process.instance import Instance
from workers.process.places import DEFAULT, Places, Pool
from workers.process.pools import create_places

SUFFIX: Final = ".yaml"
FILES_MAX: Final = 1000
PLACES_USUAL: Final = 32  # for ports that are opened while the picker runs

log = structlog.get_logger()


def found(options: Options) -> Callable[[], Instance]:
    """Reads and checks all configurations. Returns a function that creates the instance. Raises BadConfiguration."""
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
    return lambda: create_places(options, places)


def _configurations(options: Options, names: Sequence[str], most: int) -> Mapping[str, Pool]:
    """Loads the files of --config-dir by the names of their pools. Without a default.yaml, the flags say the default configuration."""
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
    """Reads the files of --config-dir. Raises BadConfiguration, also if a pool of --pool-name has none."""
    folder, plugins = options.config_dir, plugin_files(options.plugin_path)
    if not folder:
        return {DEFAULT: read_given(options)}
    try:
        files = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX) and not name.startswith("."))
    except OSError as refused:
        raise BadConfiguration(f"error: --config-dir {folder}: {refused.strerror or refused}") from refused
    if len(files) > FILES_MAX:
        raise BadConfiguration(f"error: --config-dir {folder}: {len(files)} files; at most {FILES_MAX}")
    names = [file.removesuffix(SUFFIX) for file in files]
    has_default = DEFAULT in names
    if lacking := [name for name in named if name not in names and not has_default]:
        listed = ", ".join(f"{name}{SUFFIX}" for name in lacking)
        raise BadConfiguration(f"error: --config-dir {folder}: there is neither {listed} nor {DEFAULT}{SUFFIX}")
    for name in names:
        if named and name not in (*named, DEFAULT):
            echo(f"warning: --config-dir {folder}: {name}{SUFFIX} has no effect: no --pool-name has this name", err=True)
    found = {name: Given(read_file(path := os.path.join(folder, f"{name}{SUFFIX}")), path, plugins) for name in names}
    return found if has_default else {**found, DEFAULT: read_given(options)}
