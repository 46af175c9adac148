"""`epp record start` and `export`: record the traffic of a running picker, and export recordings for other tools."""

import math
import os
import time
import uuid
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import click

from epp.recording.trace import requests
from shm.segment import SegmentError
from workers.cli.output import echo
from workers.cli.which import Named, picker_options
from workers.shared.recording import Unreadable, asks
from workers.shared.recording.export import to_jsonl, to_parquet
from workers.shared.recording.lengths import Lengths, is_streamed
from workers.shared.recording.reader import batches_of, batches_of_pool

STDOUT: Final = "-"
ANSWER_S: Final = 5.0
LOOK_S: Final = 0.2
SECONDS_MAX: Final = 7 * 86_400
REPORTS_AFTER_S: Final = 10.0
REPORTS_MAX: Final = 20_000
SILENT_S: Final = 10.0  # a recording that tells nothing for this long has lost its supervisor, which tells its state every second


@click.command("start")
@click.option(
    "--seconds",
    type=click.FloatRange(1, SECONDS_MAX),
    default=600.0,
    show_default=True,
    help="How long to record. Ctrl-C ends the recording earlier.",
)
@click.option(
    "--folder",
    default="epp-recording",
    show_default=True,
    help="Where the picker writes the files, in its own file system; it must be allowed to.",
)
@click.option("--pool", default="", metavar="NAME", help="Of several pools, record this one.  [default: all]")
@picker_options
def command(seconds: float, folder: str, pool: str, picker: Named) -> None:
    """Record the requests of a running picker on this machine: sizes, hashes, decisions and outcomes, but no prompts.

    A picker with --record-dir records all the time. Run `epp record export` to read a recording with other tools.

    Exit code 0: recorded; 1: no such picker, or it cannot record.
    """
    try:
        found = picker.find()
    except SegmentError as refused:
        raise click.ClickException(str(refused)) from refused
    run_dir, name, ask = picker.run_dir, found.name, asks.RecordAsk(uuid.uuid4().hex, os.path.abspath(folder), seconds, pool)
    _put(run_dir, name, ask)
    try:
        state = _recorded(run_dir, name, ask)
    finally:
        asks.forget(run_dir, name, ask.id)
    for file in state.files:
        echo(file)
    lost = f", {state.lost} lost ({state.why or 'a pipe was full'})" if state.lost else ""
    early = f"; it ended early: {state.why}" if state.why and not state.lost else ""
    echo(f"{state.records} records, {state.bytes / 1e6:.1f} MB{lost}{early}", err=True)


@click.command("export")
@click.argument("trace")
@click.option("--parquet", default="", help="Write a Parquet file with one row per request.")
@click.option("--jsonl", default="", help="Write one JSON object per request and line (- for standard output).")
@click.option("--pool", default="", metavar="NAME", help="Of several pools, export the requests of this one.  [default: of all]")
def export(trace: str, parquet: str, jsonl: str, pool: str) -> None:
    """Export the requests of a recording: TRACE is a file or a folder.

    Exit code 0: exported; 1: the recording cannot be read, the output cannot be written, or a package is missing.
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
    except OSError as refused:
        if jsonl == STDOUT:
            raise
        raise click.ClickException(f"{parquet or jsonl} cannot be written: {refused.strerror or refused}") from refused
    echo(f"{count} requests", err=True)


def _put(run_dir: str, name: str, ask: asks.RecordAsk) -> None:
    try:
        asks.put(run_dir, name, ask)
    except OSError as refused:
        raise click.ClickException(f"{run_dir}: {refused.strerror}: run as the picker's user") from refused


def _end(run_dir: str, name: str, ask: asks.RecordAsk) -> None:
    """Ends the recording, or takes the question back if the picker has not taken it yet."""
    _put(run_dir, name, asks.RecordAsk(ask.id, "", 0))


def _recorded(run_dir: str, name: str, ask: asks.RecordAsk) -> asks.RecordingState:
    """Follows the recording to its end, and ends it at Ctrl-C. Raises ClickException."""
    state = None
    try:
        state = _begun(run_dir, name, ask)
        echo(f"recording {ask.seconds:g} s into {ask.folder}; Ctrl-C ends it", err=True)
        return _followed(run_dir, name, state)
    except KeyboardInterrupt:
        _end(run_dir, name, ask)
        if state is None:
            raise
        return _followed(run_dir, name, state)


def _begun(run_dir: str, name: str, ask: asks.RecordAsk) -> asks.RecordingState:
    """Waits for the picker's answer. Raises ClickException if the picker refuses or does not answer."""
    until = time.monotonic() + ANSWER_S
    while time.monotonic() < until:
        state = asks.told(run_dir, name, ask.id)
        if state is not None:
            if state.state == "failed":
                raise click.ClickException(state.why)
            return state
        time.sleep(LOOK_S)
    _end(run_dir, name, ask)
    raise click.ClickException(f"{name} has not answered within {ANSWER_S:g} s: run as its user; an older version cannot record")


def _followed(run_dir: str, name: str, state: asks.RecordingState) -> asks.RecordingState:
    """Follows the recording to its end. Raises ClickException if the picker no longer tells how it goes on.

    Warns as soon as `REPORTS_AFTER_S` have shown whether answers report usage, because the user can still change this then.
    """
    heard_at = time.monotonic()
    look_at = heard_at + REPORTS_AFTER_S
    while state.state == "recording":
        if time.monotonic() > look_at:
            look_at = math.inf
            _warn_without_usage(state.files)
        if time.monotonic() - heard_at > SILENT_S:
            raise click.ClickException(f"the recording of {name} was broken off; its files are readable: {' '.join(state.files)}")
        time.sleep(LOOK_S)
        told = asks.told(run_dir, name, state.id)
        if told is not None and told != state:
            state, heard_at = told, time.monotonic()
    if look_at < math.inf:
        _warn_without_usage(state.files)
    return state


def _warn_without_usage(files: Sequence[str]) -> None:
    """Warns if streamed answers of a recording report no usage. Reads at most its first REPORTS_MAX requests."""
    lengths = Lengths()
    try:
        for traced in islice((each for file in files for each in requests(batches_of(file, lambda _: None))), REPORTS_MAX):
            if traced.ended is not None and is_streamed(traced.ended):
                lengths.add(traced.decided.model, traced.ended)
    except Unreadable:
        return
    told = lengths.told()
    if told.estimated:
        echo(f"warning: {told}. Clients that stream report it with stream_options: {{include_usage: true}}", err=True)
