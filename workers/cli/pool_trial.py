"""Reads the files of a picker of several pools again, in a trial child: the list of pools, and the configuration of one of them."""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence

from epp.config.effective import EffectiveConfig
from epp.config.findings import WHOLE, ConfigError, ConfigErrors
from epp.config.pools import PoolsFile
from workers.cli.configuration import findings_text, plugin_files
from workers.cli.flags import BadConfiguration
from workers.cli.output import echo_text
from workers.cli.places import texts_by_name
from workers.cli.pools import taken, unfit
from workers.host.options import Options
from workers.process.generations import Attempt, Bundle, GenerationLost, Given, Result
from workers.process.instance import Instance
from workers.process.loading import read_configuration, read_pools, read_text
from workers.process.places import DEFAULT
from workers.process.pool_list import Misplaced, placed
from workers.shared.objectives import static_bands


def given_of(view: Instance) -> Given:
    """Reads the configuration of a pool. `view`: the instance as the pool sees it. Raises BadConfiguration."""
    options, name = view.options, view.options.pool_name
    if not options.pools_file:
        return _of_folder(options, name)
    file = _read(options)
    entry = next((entry for entry in file.pools if entry.name == name), None)
    if entry is None:
        raise BadConfiguration(f"error[no-pool]: {file.source} has no pool '{name}' any more: reload without --pool")
    try:
        text = read_configuration(file, entry)
    except ValueError as unreadable:
        place = entry.config_place
        error = ConfigError(file.source, place.line, place.column, "unreadable", f"pool '{name}': {unreadable}")
        raise BadConfiguration(str(error)) from unreadable
    return Given(text.text, text.source, plugin_files(options.plugin_path))


def check_fit(view: Instance, config: EffectiveConfig) -> None:
    """Raises BadConfiguration if a pool cannot have this configuration beside other pools, or not without a restart."""
    name = view.options.pool_name
    if (bad := unfit(config.source, name, WHOLE, view.options, config)) is not None:
        raise BadConfiguration(str(bad))
    bands, room = len(static_bands(config.flow)), view.memory.flow.schema.bands
    if bands > room:
        why = f"pool '{name}': flow control has {bands} bands, and there is memory for {room} of this pool"
        raise BadConfiguration(str(ConfigError(config.source, 0, 0, "too-many-bands", why, "restart the picker")))


def tried_list(instance: Instance, attempt: Attempt) -> Result:
    """Returns the list of pools as the files have it now, and which pools have changed configurations. Raises BadConfiguration."""
    options = instance.options
    if not options.pools_file:
        texts = {name: _of_folder(options, name) for name in _names(instance) if name}
        pool_list = None
    else:
        file = _read(options)
        if file.warnings:
            echo_text(findings_text(file.warnings), err=True)
        try:
            ports = instance.sockets.pool_ports().values()
            pool_list = placed(instance.pool_list, instance.room, ports, file, attempt.number)
        except Misplaced as misplaced:
            place = misplaced.entry.place
            raise BadConfiguration(str(ConfigError(file.source, place.line, place.column, "restart", str(misplaced)))) from misplaced
        plugins = plugin_files(options.plugin_path)
        texts = {}
        for entry in file.pools:
            with contextlib.suppress(ValueError):  # the trial of the pool says what is wrong
                text = read_configuration(file, entry)
                texts[entry.name] = Given(text.text, text.source, plugins)
    source = options.pools_file or options.config_dir
    bundle = Bundle(attempt.number, source, None, "", {}, attempt.names, time.time(), pool_list=pool_list)
    names = {place: entry.name for place, entry in pool_list.items()} if pool_list is not None else dict(enumerate(_names(instance)))
    present = {view.options.pool_name: view for view in instance.pools}
    changed = tuple(place for place, name in sorted(names.items()) if name and _changed(present.get(name), texts.get(name)))
    return Result(os.getpid(), "", bundle, changed)


def _names(instance: Instance) -> Sequence[str]:
    return [view.options.pool_name for view in instance.pools]


def _read(options: Options) -> PoolsFile:
    try:
        file = read_pools(options.pools_file)
        file.check_ports(taken(options))
    except ConfigErrors as errors:
        raise BadConfiguration(findings_text([*errors.warnings, *errors.errors])) from errors
    return file


def _of_folder(options: Options, name: str) -> Given:
    texts: Mapping[str, Given] = texts_by_name(options, ())
    return texts.get(name) or texts[DEFAULT]


def _changed(view: Instance | None, given: Given | None) -> bool:
    """Whether the files of a pool are others than those of its configuration in force. `view`: None if it is new. `given`: None if its
    file cannot be read.
    """
    if view is None or given is None or not view.served:
        return True
    if any(source.files for source in view.sources.all):
        return True  # certificates are not kept with the configuration
    try:
        bundle = view.generations.current() if view.generations.number else view.bundle
        assert bundle is not None
        keys = {path: read_text(path) for path in bundle.keys}
    except (GenerationLost, ValueError):
        return True
    # Empty lines before the text only say where it is in the pools file.
    texts = [text if text is None else text.lstrip("\n") for text in (bundle.text, given.text)]
    return texts[0] != texts[1] or bundle.plugins != given.plugins or bundle.keys != keys
