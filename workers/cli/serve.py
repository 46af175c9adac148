"""`epp serve`: options -> configuration -> instance -> parent. Everything that can be wrong is said before the first fork."""

import os
import sys

import click

from epp.config import EffectiveConfig
from epp.plugins.discovery.file import FileDiscovery
from shm.segment import SegmentError
from workers import log, parent
from workers.allocator import keep_freed_memory
from workers.cli.configuration import load_config
from workers.cli.flags import BadConfiguration, Once
from workers.cli.options import Options, serve_options
from workers.discovery import File, parse_flag
from workers.instance import Instance, StartError, Unusable
from workers.kube.api import ready_to_connect
from workers.objects import Folder
from workers.yaml_files import DiscoveryError

FORMATS = {"auto": None, "json": False, "console": True}


@click.command("serve", cls=Once)
@serve_options
def command(options: Options) -> None:
    """Run the picker until SIGTERM or SIGINT.

    Exit code 0: stopped; 1: a port, shared memory or a child failed; 78: the configuration or a flag is wrong.
    """
    log.fill_standard_descriptors()
    log.configure(options.log_level, console=FORMATS[options.log_format])
    keep_freed_memory()
    config = load_config(options)
    check_endpoints(options, config)
    with parent.signals_held():
        try:
            instance = Instance.create(options, config)
        except Unusable as wrong:
            raise BadConfiguration(f"error: {wrong}") from wrong
        except (StartError, SegmentError) as refused:
            raise click.ClickException(str(refused)) from refused
        from workers import supervisor, worker  # once for all children, and only when there will be some

        code = parent.run(instance, supervisor=supervisor.run, worker=worker.run)
    sys.exit(code)


def check_endpoints(options: Options, config: EffectiveConfig) -> None:
    """What the supervisor would refuse at its first start, refused here."""
    try:
        if options.endpoints:
            parse_flag(options.endpoints)
        elif isinstance(config.discovery, FileDiscovery):
            File(config.discovery.path, report=lambda _: None).load()
        elif config.discovery is None:
            ready_to_connect(os.environ)
        if options.objects_dir:
            Folder(options.objects_dir, report=lambda _: None).load()
    except (DiscoveryError, ValueError) as wrong:
        raise BadConfiguration(f"{wrong}") from wrong
