"""`epp config check`: checks a configuration, or a pools file with its configurations, as `epp serve` does, without starting anything."""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import click
import msgspec

from epp.config import pools_file
from epp.config.control_headers import header_notes
from epp.config.findings import ERRORS, NOTES, WARNINGS, ConfigError, Finding
from epp.config.gateways import GATEWAYS, gateway_findings
from epp.config.load import ConfigErrors, EffectiveConfig, Surroundings, load
from epp.config.migrate import migrate as migrate_text
from epp.config.pools_file import PoolsFile, are_pools
from epp.config.registry import PluginImportError
from epp.config.yaml_nodes import dump
from workers.cli.configuration import (
    Unreadable,
    add_plugins,
    check_discovery,
    findings_text,
    key_findings,
    missing_packages,
    object_findings,
    read_file,
    shown_path,
)
from workers.cli.flags import SIZE, BadConfiguration, WithArguments
from workers.cli.manifests.extension_values import are_values, translated
from workers.cli.manifests.layers import BadValues, Layer, checked, read
from workers.cli.output import echo, echo_as_is, echo_text
from workers.cli.serve_options import flags_beside, options_of
from workers.cli.several_pools import Beside, object_names, own_options, taken
from workers.host.exit_codes import ExitCode
from workers.host.options import Options
from workers.process.loading import PoolText, missing_secret, read_configurations

NAMED_MAX = 20  # pools that have one configuration


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
@click.option("--rules", is_flag=True, is_eager=True, expose_value=False, callback=_print_rules, help="Print all rules.")
@click.option("--memory-limit", type=SIZE, default=None, help="Memory limit of the container for `epp serve`.")
@click.option("--gateway", type=click.Choice(list(GATEWAYS)), help="Warn of what cannot work with this gateway.")
@flags_beside("allow_experimental_plugins", "body_limit", "objects_dir", "plugin_path", "refresh_metrics_interval", "trust_client_headers")
def command(
    file: str, as_json: bool, migrate: bool, quiet: bool, strict: bool, memory_limit: int | None, gateway: str | None, **flags: Any
) -> None:
    """Check the configuration FILE (- for standard input) and print the effective one.

    FILE may also be a file of --pools-file: then the configuration of each of its pools is checked, too.

    All flags and variables of `epp serve` are accepted and checked with it, beside --config-file and --config-text.

    Exit code 0: the configuration is valid; 78: it is not valid, and all errors are on stderr.
    """
    options = options_of({**flags, "config_file": file, "config_text": ""}, quiet=quiet)
    source = shown_path(file)
    try:
        text = read_file(file)
    except Unreadable as error:
        if as_json:
            echo_text(_json([error.finding], None))
        raise
    add_plugins(options.plugin_path)
    if are_values(text):
        echo_as_is(_current_values(text, source, migrate=migrate), nl=False)
        return
    several = are_pools(text)
    if several and migrate:
        raise BadConfiguration(f"error: {source}: a pools file has only one form; --migrate is for the configuration files that it names")
    if migrate:
        text = _migrated(text, source)
    used, findings = (_found_pools if several else _found_one)(text, source, options, memory_limit)
    for each in used if gateway else ():
        findings += gateway_findings(each.config, gateway or "", each.config.source)
    failed = any(strict or finding.severity == "error" for finding in findings)
    if used or several:
        tenants = any(each.config.tenants is not None for each in used)
        findings += header_notes(options.trust_client_headers, source, tenants=tenants)
    if as_json:
        echo_text(_json(findings, _by_pool(used, failed=failed) if several else used[0].config.document if used else None))
    else:
        _print_findings(findings, quiet, strict)
        if migrate:
            echo_as_is(text, nl=False)
        elif not (quiet or failed):
            echo_as_is(_shown(used) if several else used[0].config.as_yaml(), nl=False)
    sys.exit(ExitCode.CONFIG if failed else ExitCode.OK)


class Used(NamedTuple):
    """A configuration, and the names of the pools that use it; no names if the picker has one pool."""

    config: EffectiveConfig
    pools: list[str]


def _found_one(text: str, source: str, options: Options, memory_limit: int | None) -> tuple[list[Used], list[Finding]]:
    """Returns the configuration, or nothing if it cannot be loaded, and the findings of `epp serve`."""
    config, findings = _found(text, source, options, memory_limit)
    return [] if config is None else [Used(config, [])], [*findings, *object_findings(options.objects_dir)]


def _found_pools(text: str, source: str, options: Options, memory_limit: int | None) -> tuple[list[Used], list[Finding]]:
    """Returns the different configurations of a pools file, and the findings of `epp serve --pools-file`."""
    options = msgspec.structs.replace(options, endpoints="", pool_given=False, endpoint_selector="")  # a pool says where they come from
    try:
        file = pools_file.read(text, source)
        file.check_ports(taken(options))
    except ConfigErrors as errors:
        return [], [*errors.warnings, *errors.errors]
    texts, unread = read_configurations(file)
    findings: list[Finding] = [*file.warnings, *unread]
    used: dict[PoolText, Used] = {}
    for given in dict.fromkeys(text for text in texts if text is not None):
        config, more = _found(given.text, given.source, options, memory_limit)
        findings += more
        if config is not None:
            used[given] = Used(config, [])
    findings += _of_pools(file, texts, options, used)
    findings += object_findings(options.objects_dir, object_names(file, options))
    return list(used.values()), findings


def _by_pool(used: Sequence[Used], *, failed: bool) -> Any:
    """Returns the effective configurations by pool as plain values, or None if any configuration is invalid."""
    return None if failed else {name: each.config.document for each in used for name in each.pools}


def _shown(used: Sequence[Used]) -> str:
    """Returns the effective configurations as one YAML text: a document for each, after a comment that names its pools."""
    return "---\n".join(f"# {_title(each)}\n{each.config.as_yaml()}" for each in used)


def _of_pools(file: PoolsFile, texts: Sequence[PoolText | None], options: Options, used: dict[PoolText, Used]) -> Iterator[ConfigError]:
    """Yields an error for each mismatch of a pool and its configuration. Adds the pools to their configurations."""
    beside = Beside()
    for entry, text in zip(file.pools, texts, strict=True):
        if text is None or text not in used:
            continue
        used[text].pools.append(entry.name)
        own, config = own_options(options, entry), used[text].config
        if (wrong := beside.unfit(file.source, entry.name, entry.place, own, config)) is not None:
            yield wrong
        elif config.discovery is None and not entry.endpoints and entry.kube is None:
            hint = "give it 'endpoints', 'poolName' or 'selector', or its configuration a file-discovery plugin"
            why = f"pool '{entry.name}': there is no source of endpoints"
            yield ConfigError(file.source, entry.place.line, entry.place.column, "no-discovery", why, hint)


def _title(used: Used) -> str:
    more = len(used.pools) - NAMED_MAX
    return f"{', '.join(used.pools[:NAMED_MAX])}{f' and {more} more' if more > 0 else ''}: {used.config.source}"


def _print_findings(findings: Sequence[Finding], quiet: bool, strict: bool) -> None:
    said = ("error", "warning", "note")[: None if not quiet else 2 if strict else 1]
    if told := [finding for finding in findings if finding.severity in said]:
        echo_text(findings_text(told), err=True)


def _found(text: str | None, source: str, options: Options, memory_limit: int | None) -> tuple[EffectiveConfig | None, list[Finding]]:
    """Returns the configuration, or None if it cannot be loaded, and the findings of `epp serve` with these options."""
    surroundings = Surroundings(
        options.scrape_interval_s, options.body_bytes_max, memory_limit, leader_election=options.ha_enable_leader_election
    )
    try:
        config = load(text, source, allow_experimental=options.allow_experimental_plugins, surroundings=surroundings)
        unread = key_findings(config)
    except ConfigErrors as errors:
        return None, [*errors.warnings, *errors.errors]
    except PluginImportError as error:
        raise click.ClickException(str(error)) from error
    if options.endpoints or options.pool_given or options.endpoint_selector:  # otherwise the source of endpoints is not known
        check_discovery(options, config)
        if (wrong := missing_secret(options, config)) is not None:
            return None, [*config.warnings, wrong]
    return config, [*config.warnings, *unread, *missing_packages(options, config)]


def _migrated(text: str, source: str) -> str:
    """Returns the configuration in its current form. Prints on stderr what cannot be migrated. Raises BadConfiguration for bad YAML."""
    try:
        migrated, remarks = migrate_text(text, source)
    except ConfigErrors as errors:
        raise BadConfiguration(findings_text(errors.errors)) from errors
    for remark in remarks:
        echo(f"{source}: {remark}", err=True)
    return migrated


def _current_values(text: str, source: str, *, migrate: bool) -> str:
    """Returns values of one of GIE's Helm charts as values of this chart. Raises BadConfiguration unless `migrate` asks for this."""
    if not migrate:
        why = "these are values of a Helm chart of the Gateway API Inference Extension, not a configuration"
        fix = "epp config check --migrate prints them for this chart; epp manifests --values takes them as they are"
        raise BadConfiguration(f"error: {source}: {why} ({fix})")
    try:
        values, remarks = translated(read(text, source))
        for remark in remarks:
            echo(f"{source}: {remark}", err=True)
        return dump(checked([Layer(source, values)]))
    except BadValues as wrong:
        raise BadConfiguration("\n".join(f"error: {line}" for line in str(wrong).splitlines())) from wrong


def _json(findings: Sequence[Finding], effective: Any) -> str:
    """Encodes the findings, in the order of the text, and the effective configuration as JSON."""
    ordered = sorted(findings, key=lambda f: (f.line == 0, f.line, f.column))
    plain = [{"severity": finding.severity} | msgspec.to_builtins(finding) for finding in ordered]
    return json.dumps({"findings": plain, "effective": effective}, indent=2)
