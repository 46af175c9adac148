"""`epp record replay`: says how other configurations would have served recorded traffic."""

from pathlib import Path
from typing import Any

import click
import msgspec

from epp.errors import PluginFault
from loadtest.replay.configurations import Configuration, configuration, differs
from loadtest.replay.figures import Condition, condition
from loadtest.replay.fit import TooLittle
from loadtest.replay.imported import Assumed, assumed_options
from loadtest.replay.progress import Progress
from loadtest.replay.report.report_page import page
from loadtest.replay.scenario import Clients, Outcome, Scenario, WhatIf, read_scenario
from loadtest.replay.servers import Form
from loadtest.replay.tables import lines
from loadtest.replay.verdict import change
from workers.cli.configuration import add_plugins, experimental_option, plugin_path_option
from workers.cli.flags import BadConfiguration, Whole
from workers.cli.offline import OfflineError
from workers.cli.output import echo_lines, echo_text
from workers.shared.recording import Unreadable


@click.command("replay")
@click.argument("trace")
@click.option("--base", default="", help="The recorded configuration. [default: the built-in one]")
@click.option("--config", "configs", multiple=True, help="A configuration to compare. Give it once for each.")
@click.option("--endpoints", type=Whole(1, 4096), help="What if there were this many endpoints, like the recorded ones?")
@click.option("--rate", type=click.FloatRange(0.01, 100), default=1.0, help="What if requests came this much faster?")
@click.option("--slots", type=Whole(1), help="What if each endpoint ran this many requests at once?")
@click.option("--clients", type=Whole(1), help="Requests come from this many clients, each of whom waits for an answer.")
@click.option("--open", "is_open", is_flag=True, help="No client waits: requests come at the recorded times.")
@click.option(
    "--fail-if",
    "fail_if",
    multiple=True,
    help="Exit with code 1 if this holds for a --config, as in 'ttft_p95 > 1.1 * base'. Give it once for each.",
)
@click.option("--html", default="", help="Write a report with plots to this file. It needs no network.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--pool", default="", metavar="NAME", help="Replay only the requests of this pool, if the recording has several.")
@assumed_options
@plugin_path_option
@experimental_option
def command(
    trace: str,
    base: str,
    configs: tuple[str, ...],
    endpoints: int | None,
    rate: float,
    slots: int | None,
    clients: int | None,
    is_open: bool,
    fail_if: tuple[str, ...],
    html: str,
    as_json: bool,
    pool: str,
    form: Form | None,
    prefill_us: float | None,
    decode_ms: float | None,
    cache_tokens: int | None,
    plugin_path: str,
    allow_experimental_plugins: bool,
) -> None:
    """Replay a recording in virtual time under other configurations. TRACE: a file or a folder of `epp record`, or a public trace.

    Model servers are fitted to the recording. The recorded configuration is replayed first, so that you see how far the model is from
    what was measured. A trace of a public format has no times: its servers are assumed.

    Exit code 0: replayed; 1: --fail-if holds, or the recording cannot be used; 2: an option or condition is wrong; 78: a
    configuration is wrong.
    """
    if clients and is_open:
        raise click.UsageError("--clients and --open exclude each other")
    limits = conditions("--fail-if", fail_if)
    add_plugins(plugin_path)
    first = configuration(base, allow_experimental_plugins)
    others = [configuration(path, allow_experimental_plugins) for path in configs]
    with Progress() as progress:
        try:
            assumed = Assumed(form, prefill_us, decode_ms, cache_tokens)
            scenario = read_scenario(trace, progress, Clients(is_open, clients or 0), endpoints, assumed, pool)
            for warning in differs(first, scenario.recording.configs):
                progress.caution(warning)
            outcome = _replayed(scenario, first, others, WhatIf(endpoints, rate, slots), progress)
        except (Unreadable, TooLittle, ValueError) as wrong:
            raise click.ClickException(str(wrong)) from wrong
        except (OfflineError, PluginFault) as wrong:
            raise BadConfiguration(str(wrong)) from wrong
    if html:
        _write(html, page(outcome))
    _tell(outcome, as_json=as_json)
    failed = [
        f"--fail-if '{limit.text}' holds for {name}"
        for limit in limits
        for name, each in outcome.others.items()
        if limit.holds(each.figures, outcome.base.figures)
    ]
    if failed:
        echo_lines(failed, err=True)
        raise SystemExit(1)


def _tell(outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        echo_text(msgspec.json.encode(_document(outcome)))
    else:
        echo_lines(lines(outcome))


def conditions(option: str, texts: tuple[str, ...]) -> list[Condition]:
    """Parses the conditions of an option. Raises UsageError."""
    try:
        return [condition(text) for text in texts]
    except ValueError as wrong:
        raise click.UsageError(f"{option}: {wrong}") from wrong


def _replayed(scenario: Scenario, first: Configuration, others: list[Configuration], what_if: WhatIf, progress: Progress) -> Outcome:
    fit = scenario.replay(first, progress)
    changed = scenario.changed(what_if)
    base = fit if changed is scenario else changed.replay(first, progress)
    names = dict(zip(_distinct([each.name for each in others]), others, strict=True))
    done = {name: changed.replay(each, progress, base.run.target) for name, each in names.items()}
    return Outcome(scenario, changed, fit, base, done)


def _distinct(names: list[str]) -> list[str]:
    """Returns the names, and adds a number to each name that is given twice."""
    return [name if names.count(name) == 1 else f"{name} ({names[: at + 1].count(name)})" for at, name in enumerate(names)]


def _document(outcome: Outcome) -> dict[str, Any]:
    scenario = outcome.changed
    names = [each.member.name for each in scenario.world.endpoints]
    return {
        "servers": dict(zip(names, scenario.world.speeds, strict=True)),
        "measured": outcome.scenario.measured_figures,
        "fit": outcome.fit_figures,
        "base": outcome.base.figures,
        "configs": {name: each.figures for name, each in outcome.others.items()},
        "verdicts": {name: change(outcome.base.runs, each.runs) for name, each in outcome.others.items()},
        "refused": {name: each.run.refused for name, each in {"base": outcome.base, **outcome.others}.items()},
    }


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as refused:
        raise click.ClickException(f"--html {path}: {refused.strerror}") from refused
