"""`epp record tune`: finds weights and parameters that serve recorded traffic better."""

import difflib
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from epp.config.load import DEFAULT_TEXT
from epp.errors import PluginFault
from loadtest.replay.command import conditions
from loadtest.replay.configurations import Configuration, configuration, differs
from loadtest.replay.figures import checked
from loadtest.replay.imported import Assumed, assumed_options
from loadtest.replay.progress import Progress
from loadtest.replay.run import World, world
from loadtest.replay.scenario import Clients, Scenario, read_scenario
from loadtest.replay.servers import Form
from loadtest.tune.confirm import Verdict, confirm
from loadtest.tune.search import Candidate, Goal, Part, Search, Space
from loadtest.tune.search import Progress as Trial
from workers.cli.configuration import add_plugins, experimental_option, plugin_path_option
from workers.cli.flags import BadConfiguration, Whole
from workers.cli.offline import OfflineError
from workers.cli.output import echo, echo_text
from workers.shared.recording import Unreadable

TRAINING_SHARE = 0.6  # the share of the requests that the search uses; the others are held out
PART_MIN = 100  # requests
WARM_UP = 0.2  # the share of the training part that does not count
OPEN_OBJECTIVES = ("requests", "moved")


@click.command("tune")
@click.argument("trace")
@click.option("--objective", default="ttft_p95", show_default=True, help="The figure to improve; `epp record replay --json` lists all.")
@click.option(
    "--subject-to",
    "subject_to",
    multiple=True,
    help="What must hold, as in 'errors <= base'. Give it once for each. [default: errors <= base]",
)
@click.option("--base", default="", help="The configuration to improve, with which was recorded. [default: the built-in one]")
@click.option("--add", "added", multiple=True, help="A scorer to try beside those of the configuration. Give it once for each.")
@click.option("--trials", type=Whole(1, 100_000), default=60, show_default=True, help="Configurations to try.")
@click.option("--seconds", type=click.FloatRange(1), default=3600.0, show_default=True, help="Stop trying after this time.")
@click.option("--trial-requests", type=Whole(PART_MIN), default=12_000, show_default=True, help="Requests per trial, at most.")
@click.option("--clients", type=Whole(1), help="Requests come from this many clients, each of whom waits for an answer.")
@click.option("--open", "is_open", is_flag=True, help="No client waits: requests come at the recorded times.")
@click.option("--seed", type=int, default=1, show_default=True, help="Equal seeds give equal results.")
@click.option("--output", default="", help="Write the better configuration to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--endpoints", type=Whole(1, 4096), help="Servers, for a trace without times. [default: 8]")
@click.option("--pool", default="", metavar="NAME", help="Use only the requests of this pool, if the recording has several.")
@assumed_options
@plugin_path_option
@experimental_option
def command(
    trace: str,
    objective: str,
    subject_to: tuple[str, ...],
    base: str,
    added: tuple[str, ...],
    trials: int,
    seconds: float,
    trial_requests: int,
    clients: int | None,
    is_open: bool,
    seed: int,
    output: str,
    as_json: bool,
    pool: str,
    endpoints: int | None,
    form: Form | None,
    prefill_us: float | None,
    decode_ms: float | None,
    cache_tokens: int | None,
    plugin_path: str,
    allow_experimental_plugins: bool,
) -> None:
    """Find better weights and parameters for recorded traffic. TRACE: a file or a folder of `epp record`, or a public trace.

    Tries values on the first 60 % of the recording, and confirms the best ones on the rest. Prints the change as a patch, with the expected
    gain, or says that nothing is better. Ctrl-C ends the search; the best result so far is confirmed.

    Exit code 0: also if nothing is better; 1: the recording cannot be used; 2: an option is wrong; 78: the configuration is wrong.
    """
    if clients and is_open:
        raise click.UsageError("--clients and --open exclude each other")
    goal = Goal(_objective(objective), conditions("--subject-to", subject_to or ("errors <= base",)))
    add_plugins(plugin_path)
    config = configuration(base, allow_experimental_plugins)
    text = config.text or DEFAULT_TEXT
    with Progress() as progress:
        space = _space(config, text, added)
        try:
            behaviour = Clients(is_open, clients or 0)
            assumed = Assumed(form, prefill_us, decode_ms, cache_tokens)
            scenario = read_scenario(trace, progress, behaviour, endpoints, assumed, pool)
            for warning in differs(config, scenario.recording.configs):
                progress.caution(warning)
            training, held_out = _parts(scenario, trial_requests, behaviour)
            search = Search(training, space, goal, seed)
            best = search.best(trials, seconds, _told(progress, objective))
            progress.show("confirming on the held-out part; Ctrl-C ends without a result")
            verdict = confirm(held_out, space.with_values({}), space.with_values(best.values), goal, seed) if best.values else None
        except KeyboardInterrupt as again:
            raise click.Abort from again
        except (Unreadable, ValueError) as wrong:
            raise click.ClickException(str(wrong)) from wrong
        except (OfflineError, PluginFault) as wrong:
            raise BadConfiguration(str(wrong)) from wrong
    _tell(_Result(search, best, verdict, space, config, objective), as_json=as_json, output=output)


def _space(config: Configuration, text: str, added: tuple[str, ...]) -> Space:
    try:
        space = Space(config, text, added)
    except ValueError as wrong:
        raise click.UsageError(f"--add: {wrong}") from wrong
    if not space.knobs:
        raise click.ClickException(f"{config.name}: nothing to tune: no profile has two scorers, and no parameter has a tuned range")
    return space


class _Result(msgspec.Struct, frozen=True):
    """What a search has found."""

    search: Search
    best: Candidate
    verdict: Verdict | None
    space: Space
    config: Configuration
    objective: str

    @property
    def better(self) -> bool:
        return self.verdict is not None and self.verdict.better

    def patch(self) -> str:
        """Returns the change of the configuration as a unified diff, which `patch` applies."""
        name = self.config.name
        before, after = (self.space.text.splitlines(keepends=True), self.space.text_with(self.best.values).splitlines(keepends=True))
        return "".join(difflib.unified_diff(before, after, name, f"{name} (tuned)"))


def _objective(name: str) -> str:
    try:
        checked(name)
    except ValueError as wrong:
        raise click.UsageError(f"--objective: {wrong}") from wrong
    if name in OPEN_OBJECTIVES:
        raise click.UsageError(f"--objective: '{name}' is neither good nor bad; choose a time, errors, hit_rate or load")
    return name


def _parts(scenario: Scenario, trial_requests: int, clients: Clients) -> tuple[Part, Part]:
    """Returns the training part and the held-out part. The first requests of each part fill caches and queues, and are left out."""
    whole = scenario.world
    requests = whole.requests
    split = int(TRAINING_SHARE * len(requests))
    if min(split, len(requests) - split) < PART_MIN:
        raise click.ClickException(
            f"the recording has {len(requests)} requests; at least {int(PART_MIN / (1 - TRAINING_SHARE)) + 1} are needed: record for longer"
        )

    def part(start: int, end: int) -> World:
        return world(requests[start:end], whole.endpoints, whole.speeds, open=clients.open, clients=clients.number)

    start, end = max(split - trial_requests, 0), min(split + trial_requests, len(requests))
    return Part(part(start, split), int(WARM_UP * (split - start))), Part(part(start, end), split - start)


def _told(progress: Progress, objective: str) -> Any:
    begun = time.monotonic()

    def told(trial: Trial) -> None:
        text = (
            f"trial {trial.trial} of {trial.trials}, {time.monotonic() - begun:.0f} s: "
            f"best {objective} {trial.best:.4g}, base {trial.base:.4g}"
        )
        if trial.improved:
            progress.note(text)
        else:
            progress.show(f"{text}; Ctrl-C takes the best")

    return told


def _tell(result: _Result, *, as_json: bool, output: str) -> None:
    if output and result.better:
        try:
            Path(output).write_text(result.space.text_with(result.best.values), encoding="utf-8")
        except OSError as refused:
            raise click.ClickException(f"--output {output}: {refused.strerror}") from refused
    if as_json:
        echo_text(msgspec.json.encode(_document(result)))
        return
    search = result.search
    until = ", until Ctrl-C" if search.interrupted else ""
    echo(f"{search.tried} configurations tried{until}, {len(result.space.knobs)} values each")
    verdict = result.verdict
    if verdict is None:
        echo("nothing is better than the configuration on the training part")
        return
    before, after = (getattr(each, result.objective) for each in (verdict.base, verdict.best))
    echo(
        f"held-out part: {result.objective} {before:.4g} before, {after:.4g} after; "
        f"gain {verdict.gain:.1%} (95 %: {verdict.low:.1%} to {verdict.high:.1%})"
    )
    if not verdict.better:
        chance = "this may be chance" if verdict.gain > 0 else "what helped on the training part does not help there"
        why = chance if verdict.low <= 0 else "a condition of --subject-to does not hold there"
        echo(f"nothing is better: {why}")
        return
    echo(f"expected gain: {verdict.gain:.1%}; the change:")
    echo_text(result.patch(), nl=False)


def _document(result: _Result) -> dict[str, Any]:
    names = {knob.path: knob.name for knob in result.space.knobs}
    return {
        "objective": result.objective,
        "trials": result.search.tried,
        "interrupted": result.search.interrupted,
        "training": {"base": result.search.base, "best": result.best.figures},
        "held_out": result.verdict,
        "better": result.better,
        "values": {names[path]: value for path, value in result.best.values.items()},
        "patch": result.patch() if result.better else "",
    }
