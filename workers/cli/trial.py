"""Runs the trial child of a reload: reads the configuration, checks it as `epp serve` does, tries it, and stores the result."""

import contextlib
import io
import os
import resource
import time
from typing import Final

import msgspec

from epp.decision.tryout import Share
from shm.segment import SegmentError
from workers.cli.configuration import STDIN, check_endpoints, check_objects, load_config, plugin_files, read_given
from workers.cli.flags import BadConfiguration
from workers.cli.pool_trial import check_fit, given_of, tried_list
from workers.host.memory import cgroup_limit, share
from workers.host.proc import data_bytes
from workers.process import StartError
from workers.process.generations import Attempt, Bundle, Given, Result
from workers.process.instance import Instance
from workers.process.loading import in_force
from workers.worker.trial import Unproven, prove

ROOM_BYTES: Final = 1 << 30  # the memory of a trial if that of workers has no limit
ROOM_BYTES_MIN: Final = 256 << 20  # the least, because the limit also counts memory that is reserved and not used


def run(instance: Instance, attempt: Attempt) -> int:
    """Writes the result of this trial: a configuration, or why it is refused. Returns the exit code of the child."""
    pid = os.getpid()
    said = io.StringIO()
    bound_memory(instance)
    try:
        with contextlib.redirect_stderr(said):
            result = tried(instance, attempt)
        result = msgspec.structs.replace(result, text=said.getvalue().strip())
    except BadConfiguration as refused:
        result = Result(pid, refused.message)
    except (StartError, SegmentError, Unproven) as refused:
        result = Result(pid, str(refused))
    except MemoryError:
        result = Result(pid, "error[trial]: the configuration took more memory in the trial than a worker may use")
    if os.getpid() != pid:  # this process is a copy that a plugin has forked, and it must not write the result
        return 1
    try:
        instance.generations.store(attempt.slot, result)
    except ValueError as too_large:
        instance.generations.store(attempt.slot, Result(pid, f"error[too-large]: {too_large}"))
    return 0


def bound_memory(instance: Instance) -> None:
    """Limits the memory of this process to that of a worker plus a private copy of the shared memory. More raises MemoryError."""
    options = instance.options
    room = max(ROOM_BYTES_MIN, share(options.worker_memory_limit, cgroup_limit(), options.workers) or ROOM_BYTES)
    limit = data_bytes() + sum(instance.layout.needs().values()) + room
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def tried(instance: Instance, attempt: Attempt) -> Result:
    """Tries the picker's present files, or the candidate in `attempt`, and returns the result if the configuration is good.

    `instance`: as the pool sees it. If it is that of several pools, tries the list of pools. Raises the error with which the configuration
    is refused.
    """
    if instance.pools:
        return tried_list(instance, attempt)
    options, ask = instance.options, attempt.ask
    if ask is not None:
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
        followed=ask is None,
        share=ask.share if ask is not None else Share(),
        keys=config.key_texts,
        pool=options.pool_name if instance.pool is not None else "",
    )
    if instance.pool is not None:
        check_fit(instance, config)
    view = instance.under(config, bundle, copied=True).with_scrape_tls()
    if ask is not None:
        check_columns(present, view)
    prove(view)
    return Result(os.getpid(), "", msgspec.structs.replace(bundle, names=view.layout.names))


def check_columns(present: Instance, view: Instance) -> None:
    """Raises BadConfiguration if a candidate reads endpoint metrics that the configuration in force does not scrape."""
    scraped = {column.name for column in present.layout.wanted}
    if missing := sorted(column.name for column in view.layout.wanted if column.name not in scraped):
        raise BadConfiguration(
            f"error[candidate-data]: plugins of the candidate read {', '.join(missing)} of endpoints, which nothing reads in the "
            "configuration in force, so nothing scrapes it: reload with the candidate instead of trying it"
        )
