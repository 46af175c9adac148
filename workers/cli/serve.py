"""`epp serve`: options -> configuration -> instance -> parent. All errors are reported before the first fork."""

import sys
import time
from collections.abc import Callable

import workers.host.log  # noqa: F401  # before all that import structlog: it leaves out 5 MiB that structlog would load

# isort: split
import click

from shm.segment import SegmentError
from workers.cli.configuration import check_endpoints, check_kubernetes, check_objects, load_config, read_given, with_one_worker
from workers.cli.flags import BadConfiguration, Grouped
from workers.cli.serve_flags import COMMON
from workers.cli.serve_options import serve_options
from workers.cli.several_pools import found, several
from workers.host import log
from workers.host.memory import keep_freed_memory
from workers.host.options import Options
from workers.process import StartError, Unusable, parent
from workers.process.generations import Bundle
from workers.process.instance import Instance
from workers.process.loading import in_force
from workers.process.signals import signals_held

FORMATS = {"auto": None, "json": False, "console": True}


@click.command("serve", cls=Grouped, common=COMMON)
@serve_options
def command(options: Options) -> None:
    """Run the picker until SIGTERM or SIGINT.

    Exit code 0: stopped by a signal; 1: a port, shared memory or a child failed; 78: the configuration or a flag is invalid.
    """
    log.fill_standard_descriptors()
    log.configure(options.log_level, console=FORMATS[options.log_format])
    keep_freed_memory()
    created = several(options) if options.pools_file else found(options) if options.finds_pools else single(options)
    with signals_held():
        try:
            instance = created()
        except Unusable as error:
            raise BadConfiguration(f"error: {error}") from error
        except (StartError, SegmentError) as error:
            raise click.ClickException(str(error)) from error
        code = run_parent(instance)
    sys.exit(code)


def single(options: Options) -> Callable[[], Instance]:
    """Reads and checks the configuration of one pool. Returns a function that creates its instance. Raises BadConfiguration."""
    given = read_given(options)
    config = load_config(options, given)
    options = with_one_worker(options, config)
    check_endpoints(options, config)
    check_objects(options.objects_dir)
    check_kubernetes(options, config)

    def created() -> Instance:
        instance = Instance.create(options, config)
        names = instance.layout.names
        instance.begin(Bundle(1, given.source, given.text, options.plugin_path, given.plugins, names, time.time(), keys=config.key_texts))
        return instance

    return created


def run_parent(instance: Instance) -> int:
    """Runs the parent to the end of the picker."""
    from workers.supervisor import main as supervisor  # imported once for all children, after the checks
    from workers.worker import main as worker  # imported once for all children, after the checks

    import_parts(instance)
    kv_events = run_kv_events if instance.layout.kv_events is not None else None
    from workers.cli import trial  # after the imports of workers, because a trial needs them, too

    return parent.run(instance, supervisor=supervisor.run, worker=worker.run, kv_events=kv_events, trial=trial.run)


def import_parts(instance: Instance) -> None:
    """Imports modules that only some commands or some pickers need, once for all children, while forking stays safe.

    A late import in a child would stop its event loop, on a busy CPU for so long that the parent takes the child for a hung one.
    """
    import encodings.idna  # noqa: F401  # the codec with which host names are looked up

    import numpy.ma  # noqa: F401  # np.unique imports it when it is first called

    if instance.in_kubernetes:
        from workers.supervisor import kubernetes  # noqa: F401
        from workers.supervisor.kube import review, session  # noqa: F401
    if instance.options.replica_store:
        from workers.supervisor import replication  # noqa: F401


def run_kv_events(instance: Instance) -> int:
    """Runs the kv-events process. Imports ZeroMQ here, in the child, because the parent does not need it."""
    from workers.supervisor.kv_events import main

    return main.run(in_force(instance))
