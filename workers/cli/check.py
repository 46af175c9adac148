"""`epp check`: checks a configuration as `epp serve` does, without starting anything."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import click
import msgspec

from epp.config.control_headers import header_notes
from epp.config.findings import ERRORS, NOTES, WARNINGS, Finding
from epp.config.gateways import GATEWAYS, gateway_findings
from epp.config.load import ConfigErrors, Surroundings, load
from epp.config.migrate import migrate as migrate_text
from epp.config.registry import PluginImportError
from workers.cli import trust
from workers.cli.configuration import (
    Unreadable,
    add_plugins,
    experimental_option,
    findings_text,
    object_findings,
    plugin_path_option,
    read_file,
    shown_path,
)
from workers.cli.flags import DURATION, SIZE, BadConfiguration, WithArguments
from workers.cli.output import echo, echo_as_is, echo_text
from workers.host.exit_codes import ExitCode


def _print_rules(ctx: click.Context, _option: click.Parameter, requested: bool) -> None:
    if requested and not ctx.resilient_parsing:
        width = max(map(len, (*ERRORS, *WARNINGS, *NOTES)))
        for severity, rules in (("error", ERRORS), ("warning", WARNINGS), ("note", NOTES)):
            for rule, text in rules.items():
                echo(f"{severity:<7}  {rule:<{width}}  {text}")
        ctx.exit()


@click.command("check", cls=WithArguments)
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Print findings and the effective configuration as JSON.")
@click.option("--migrate", is_flag=True, help="Print the file in its current form, comments included, and check that.")
@click.option("--quiet", "-q", is_flag=True, help="Print errors only; with --strict, warnings too.")
@click.option("--strict", is_flag=True, help="Count warnings as errors.")
@click.option(
    "--rules", is_flag=True, is_eager=True, expose_value=False, callback=_print_rules, help="Print all rules."
)
@experimental_option
@click.option("--refresh-metrics-interval", type=DURATION, default="50ms", help="The value for `epp serve`.")
@click.option("--body-limit", type=SIZE, default="32MiB", help="The value for `epp serve`.")
@click.option("--memory-limit", type=SIZE, default=None, help="Memory limit of the container for `epp serve`.")
@click.option("--objects-dir", default="", help="The value for `epp serve`; the files in the folder are checked, too.")
@click.option("--gateway", type=click.Choice(list(GATEWAYS)), help="Warn of what cannot work with this gateway.")
@trust.trust_option
@plugin_path_option
def command(
    file: str,
    as_json: bool,
    migrate: bool,
    quiet: bool,
    strict: bool,
    allow_experimental_plugins: bool,
    refresh_metrics_interval: float,
    body_limit: int,
    memory_limit: int | None,
    objects_dir: str,
    gateway: str | None,
    trust_client_headers: tuple[str, ...],
    plugin_path: str,
) -> None:
    """Check the configuration FILE (- for standard input) and print the effective one.

    Exit code 0: the configuration is valid; 78: it is not, and all errors are on stderr.
    """
    if wrong := trust.faults(trust_client_headers):
        raise click.UsageError(wrong[0])
    source = shown_path(file)
    try:
        text = read_file(file)
    except Unreadable as error:
        if as_json:
            echo_text(_json([error.finding], None))
        raise
    surroundings = Surroundings(refresh_metrics_interval, body_limit, memory_limit)
    add_plugins(plugin_path)
    if migrate:
        text = _migrated(text, source)
    effective, findings, failed = None, list[Finding](), True
    try:
        config = load(text, source, allow_experimental=allow_experimental_plugins, surroundings=surroundings)
    except ConfigErrors as errors:
        findings = [*errors.warnings, *errors.errors]
    except PluginImportError as error:
        raise click.ClickException(str(error)) from error
    else:
        findings = [*config.warnings, *(gateway_findings(config, gateway, source) if gateway else ())]
        failed, effective = strict and bool(findings), config
    remarks = object_findings(objects_dir)
    notes = header_notes(trust.trusted(trust_client_headers), source) if effective is not None else ()
    findings, failed = [*findings, *remarks, *notes], failed or any(strict or f.severity == "error" for f in remarks)
    if as_json:
        echo_text(_json(findings, None if effective is None else effective.document))
    else:
        if shown := [
            finding
            for finding in findings
            if not quiet or finding.severity in (("error", "warning") if strict else ("error",))
        ]:
            echo_text(findings_text(shown), err=True)
        if migrate:
            echo_as_is(text, nl=False)
        elif effective is not None and not (quiet or failed):
            echo_as_is(effective.as_yaml(), nl=False)
    sys.exit(ExitCode.CONFIG if failed else ExitCode.OK)


def _migrated(text: str, source: str) -> str:
    """Returns the configuration in its current form. Prints on stderr what cannot be migrated. Raises BadConfiguration for bad YAML."""
    try:
        migrated, remarks = migrate_text(text, source)
    except ConfigErrors as errors:
        raise BadConfiguration(findings_text(errors.errors)) from errors
    for remark in remarks:
        echo(f"{source}: not migrated: {remark}", err=True)
    return migrated


def _json(findings: Sequence[Finding], effective: Any) -> str:
    """Encodes the findings, in the order of the text, and the effective configuration as JSON."""
    ordered = sorted(findings, key=lambda f: (f.line == 0, f.line, f.column))
    plain = [{"severity": finding.severity} | msgspec.to_builtins(finding) for finding in ordered]
    return json.dumps({"findings": plain, "effective": effective}, indent=2)
