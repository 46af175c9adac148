"""`epp check`: what `epp serve` would say about a configuration, without starting anything."""

import json
import sys
from typing import Any

import click
import msgspec

from epp.config import ConfigErrors, load
from epp.findings import Finding
from epp.registry import PluginImportError
from workers.cli.configuration import read_file, told
from workers.exit_codes import ExitCode


@click.command("check")
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Print errors, warnings and the effective configuration as JSON.")
@click.option("--quiet", "-q", is_flag=True, help="Print errors only.")
@click.option("--allow-experimental-plugins", is_flag=True, help="Accept experimental plugin types.")
def command(file: str, as_json: bool, quiet: bool, allow_experimental_plugins: bool) -> None:
    """Check the configuration FILE (- for standard input) and print the effective one.

    Exit code 0: it is valid; 78: it is not, all errors are on stderr.
    """
    text, source = read_file(file), "<stdin>" if file == "-" else file
    try:
        config = load(text, source, allow_experimental=allow_experimental_plugins)
    except ConfigErrors as wrong:
        if as_json:
            click.echo(_json(wrong.errors, wrong.warnings, None))
        else:
            click.echo(told([*([] if quiet else wrong.warnings), *wrong.errors]), err=True)
        sys.exit(ExitCode.CONFIG)
    except PluginImportError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(_json((), config.warnings, config.document))
    elif not quiet:
        for warning in config.warnings:
            click.echo(warning, err=True)
        click.echo(config.as_yaml(), nl=False)


def _json(errors: tuple[Finding, ...], warnings: tuple[Finding, ...], effective: Any) -> str:
    document = {"errors": _plain(errors), "warnings": _plain(warnings), "effective": effective}
    return json.dumps(document, indent=2)


def _plain(findings: tuple[Finding, ...]) -> Any:
    return [msgspec.to_builtins(finding) for finding in findings]
