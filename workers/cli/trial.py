"""Runs the trial child of a reload: reads the configuration, checks it as `epp serve` does, tries it, and stores the result.

In a picker of several pools, a trial is about the configuration of one pool, or about the list of pools.
"""

import contextlib
import io
import os
import resource
import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from epp.config.effective import EffectiveConfig
from epp.config.findings import WHOLE, ConfigError
from epp.plugin import foreign
from shm.segment import SegmentError
from workers.cli.configuration import STDIN, check_endpoints, check_objects, findings_text, load_config, plugin_files, read_given
from workers.cli.flags import BadConfiguration
from workers.cli.output import echo_text
from workers.cli.several_pools import read, texts_by_name, unfit
from workers.host.memory import cgroup_limit, share
from workers.host.options import Options
from workers.host.proc import data_bytes
from workers.process import StartError
from workers.process.generations import Attempt, Bundle, GenerationLost, Given, TrialResult
from workers.process.instance import Instance
from workers.process.loading import in_force, read_configuration, read_text
from workers.process.places import DEFAULT
from workers.process.pool_list import Misplaced, placed
from workers.shared.objectives import static_bands
from workers.worker.trial import Unproven, prove

ROOM_BYTES: Final = 1 << 30  # the memory of a trial if workers have no limit of memory
ROOM_BYTES_MIN: Final = 256 << 20  # the smallest limit, because the limit also counts memory that is reserved and not used


def run(instance: Instance, attempt: Attempt) -> int:
    """Writes the result of this trial: a configuration, or the reason for its refusal. Returns the exit code of the child."""
    pid = os.getpid()
    said = io.StringIO()
    bound_memory(instance)
    try:
        with contextlib.redirect_stderr(said):
            result = tried(instance, attempt)
        result = msgspec.structs.replace(result, text=said.getvalue().strip())
    except BadConfiguration as refused:
        result = TrialResult(pid, refused.message)
    except (StartError, SegmentError, Unproven) as refused:
        result = TrialResult(pid, str(refused))
    except MemoryError:
        result = TrialResult(pid, "error[trial]: the configuration took more memory in the trial than a worker may use")
    if os.getpid() != pid:  # this process is a copy, forked by a plugin, and must not write the result
        return 1
    try:
        instance.generations.store(attempt.slot, result)
    except ValueError as too_large:
        instance.generations.store(attempt.slot, TrialResult(pid, f"error[too-large]: {too_large}"))
    return 0


def bound_memory(instance: Instance) -> None:
    """Limits the memory of this process to the memory of a worker plus a private copy of the shared memory. Beyond this limit, Python
    raises MemoryError.
    """
    options = instance.options
    room = max(ROOM_BYTES_MIN, share(options.worker_memory_limit, cgroup_limit(), options.workers) or ROOM_BYTES)
    limit = data_bytes() + sum(instance.layout.needs().values()) + room
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def tried(instance: Instance, attempt: Attempt) -> TrialResult:
    """Tries the picker's present files, or the candidate in `attempt`, and returns the result if the configuration is good.

    `instance`: the instance as the pool sees it. For the instance of several pools, tries the list of pools. Raises the error that refuses
    the configuration.
    """
    if instance.pools:
        return tried_list(instance, attempt)
    options, ask = instance.options, attempt.ask
    reloads = ask.what == "reload"
    if not reloads:
        present = in_force(instance)
        given = Given(ask.text, ask.source, plugin_files(options.plugin_path))
    elif instance.pool is not None:
        given = given_of(instance)
    else:
        if options.config_file == STDIN:
            raise BadConfiguration("the configuration came from standard input, which cannot be read again: give --config-file a file")
        given = read_given(options)
    config = load_config(options, given)
    check_endpoints(options, config)
    check_objects(options.objects_dir)
    bundle = Bundle(
        attempt.number,
        given.source,
        given.text,
        options.plugin_path,
        given.plugins,
        attempt.names,
        time.time(),
        followed=reloads,
        share=ask.share,
        keys=config.key_texts,
        pool=options.pool_name if instance.pool is not None else "",
        foreign=tuple(name for name, each in config.pipeline.plugins.items() if foreign(type(each))),
    )
    if instance.pool is not None:
        check_fit(instance, config)
    view = instance.under(config, bundle, copied=True).with_scrape_tls()
    if not reloads:
        check_columns(present, view)
    prove(view)
    return TrialResult(os.getpid(), "", msgspec.structs.replace(bundle, names=view.layout.names))


def check_columns(present: Instance, view: Instance) -> None:
    """Raises BadConfiguration if a candidate reads endpoint metrics that the configuration in force does not scrape."""
    scraped = {column.name for column in present.layout.wanted}
    if missing := sorted(column.name for column in view.layout.wanted if column.name not in scraped):
        raise BadConfiguration(
            f"error[candidate-data]: plugins of the candidate read {', '.join(missing)} of endpoints, which nothing reads in the "
            "configuration in force, so nothing scrapes it: reload with the candidate instead of trying it"
        )


def given_of(view: Instance) -> Given:
    """Reads the configuration of a pool. `view`: the instance as the pool sees it. Raises BadConfiguration."""
    options, name = view.options, view.options.pool_name
    if not options.pools_file:
        return _of_folder(options, name)
    file = read(options)
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


def tried_list(instance: Instance, attempt: Attempt) -> TrialResult:
    """Returns the list of pools from the present files, and the pools with changed configurations. Raises BadConfiguration."""
    options = instance.options
    if not options.pools_file:
        texts = {name: _of_folder(options, name) for name in _names(instance) if name}
        pool_list = None
    else:
        file = read(options)
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
            with contextlib.suppress(ValueError):  # the trial of the pool reports the error
                text = read_configuration(file, entry)
                texts[entry.name] = Given(text.text, text.source, plugins)
    source = options.pools_file or options.config_dir
    bundle = Bundle(attempt.number, source, None, "", {}, attempt.names, time.time(), pool_list=pool_list)
    names = {place: entry.name for place, entry in pool_list.items()} if pool_list is not None else dict(enumerate(_names(instance)))
    present = {view.options.pool_name: view for view in instance.pools}
    changed = tuple(place for place, name in sorted(names.items()) if name and _changed(present.get(name), texts.get(name)))
    return TrialResult(os.getpid(), "", bundle, changed)


def _names(instance: Instance) -> Sequence[str]:
    return [view.options.pool_name for view in instance.pools]


def _of_folder(options: Options, name: str) -> Given:
    texts: Mapping[str, Given] = texts_by_name(options, ())
    return texts.get(name) or texts[DEFAULT]


def _changed(view: Instance | None, given: Given | None) -> bool:
    """Returns whether the files of a pool differ from its configuration in force. `view`: None for a new pool. `given`: None if its file
    cannot be read.
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
    # Empty lines before the text only mark its line in the pools file.
    texts = [text if text is None else text.lstrip("\n") for text in (bundle.text, given.text)]
    return texts[0] != texts[1] or bundle.plugins != given.plugins or bundle.keys != keys
