"""`epp check`: what `epp serve` would say about a configuration, without starting anything."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import click
import msgspec

from epp.config import ConfigErrors, Surroundings, load
from epp.findings import ERRORS, WARNINGS, Finding
from epp.registry import PluginImportError
from workers.cli.configuration import (
    STDIN,
    Unreadable,
    add_plugins,
    object_findings,
    plugin_path_option,
    read_file,
    told,
)
from workers.cli.flags import DURATION, SIZE
from workers.exit_codes import ExitCode


def _print_rules(ctx: click.Context, _option: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        width = max(map(len, (*ERRORS, *WARNINGS)))
        for severity, rules in (("error", ERRORS), ("warning", WARNINGS)):
            for rule, text in rules.items():
                click.echo(f"{severity:<7}  {rule:<{width}}  {text}")
        ctx.exit()


@click.command("check")
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Print findings and the effective configuration as JSON.")
@click.option("--quiet", "-q", is_flag=True, help="Print errors only; with --strict, warnings too.")
@click.option("--strict", is_flag=True, help="Warnings count as errors.")
@click.option(
    "--rules", is_flag=True, is_eager=True, expose_value=False, callback=_print_rules, help="Print all rules."
)
@click.option("--allow-experimental-plugins", is_flag=True, help="Accept experimental plugin types.")
@click.option("--refresh-metrics-interval", type=DURATION, default="50ms", help="As it will be for `epp serve`.")
@click.option("--body-limit", type=SIZE, default="32MiB", help="As it will be for `epp serve`.")
@click.option("--memory-limit", type=SIZE, default=None, help="Of the container that `epp serve` will have.")
@click.option("--objects-dir", default="", help="As it will be for `epp serve`: its files are checked too.")
@plugin_path_option
def command(
    file: str,
    as_json: bool,
    quiet: bool,
    strict: bool,
    allow_experimental_plugins: bool,
    refresh_metrics_interval: float,
    body_limit: int,
    memory_limit: int | None,
    objects_dir: str,
    plugin_path: str,
) -> None:
    """Check the configuration FILE (- for standard input) and print the effective one.

    Exit code 0: it is valid; 78: it is not, all errors are on stderr.
    """
    source = "<stdin>" if file == STDIN else file
    try:
        text = read_file(file)
    except Unreadable as wrong:
        if as_json:
            click.echo(_json([wrong.finding], None))
        raise
    around = Surroundings(refresh_metrics_interval, body_limit, memory_limit)
    add_plugins(plugin_path)
    effective, findings, failed = None, list[Finding](), True
    try:
        config = load(text, source, allow_experimental=allow_experimental_plugins, around=around)
    except ConfigErrors as wrong:
        findings = [*wrong.warnings, *wrong.errors]
    except PluginImportError as error:
        raise click.ClickException(str(error)) from error
    else:
        findings, failed, effective = [*config.warnings], strict and bool(config.warnings), config
    of_objects = object_findings(objects_dir)
    findings, failed = [*findings, *of_objects], failed or any(strict or f.severity == "error" for f in of_objects)
    if as_json:
        click.echo(_json(findings, None if effective is None else effective.document))
    else:
        if shown := [finding for finding in findings if not quiet or strict or finding.severity == "error"]:
            click.echo(told(shown), err=True)
        if effective is not None and not (quiet or failed):
            click.echo(effective.as_yaml(), nl=False)
    sys.exit(ExitCode.CONFIG if failed else ExitCode.OK)


def _json(findings: Sequence[Finding], effective: Any) -> str:
    """Findings in the order of the text."""
    ordered = sorted(findings, key=lambda f: (f.line == 0, f.line, f.column))
    plain = [{"severity": finding.severity} | msgspec.to_builtins(finding) for finding in ordered]
    return json.dumps({"findings": plain, "effective": effective}, indent=2)
