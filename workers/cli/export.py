"""`epp record export`: exports recordings for other tools."""

from pathlib import Path

import click

from epp.recording.trace import requests
from workers.cli.output import echo
from workers.shared.recording import Unreadable
from workers.shared.recording.export import to_jsonl, to_parquet
from workers.shared.recording.reader import batches_of, batches_of_pool


@click.command("export")
@click.argument("trace")
@click.option("--parquet", default="", help="Write a Parquet file with one row per request.")
@click.option("--jsonl", default="", help="Write one JSON object per request and line (- for standard output).")
@click.option("--pool", default="", metavar="NAME", help="Export only the requests of this pool of several.  [default: of all]")
def command(trace: str, parquet: str, jsonl: str, pool: str) -> None:
    """Export the requests of a recording: TRACE is a file or a folder.

    Exit code 0: exported; 1: the recording cannot be read, or a package is missing.
    """
    if bool(parquet) == bool(jsonl):
        raise click.UsageError("give one of --parquet and --jsonl")

    def say(problem: str) -> None:
        echo(f"warning: {problem}", err=True)

    try:
        found = requests(batches_of_pool(trace, say, pool) if pool else batches_of(trace, say))
        if parquet:
            count = to_parquet(found, Path(parquet))
        else:
            with click.open_file(jsonl, "wb") as out:
                count = to_jsonl(found, out.write)
    except Unreadable as problem:
        raise click.ClickException(str(problem)) from problem
    echo(f"{count} requests", err=True)
