"""`epp replay`: says how other configurations would have served recorded traffic."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import click
import msgspec
import numpy as np

from epp.config.load import EffectiveConfig, Surroundings
from epp.errors import PluginFault
from epp.plugin import Scorer
from epp.recording.records import Member
from epp.recording.trace import Trace, Traced
from workers.cli.configuration import add_plugins, experimental_option, load_text, plugin_path_option, read_file
from workers.cli.flags import BadConfiguration, Whole
from workers.cli.offline import OfflineError
from workers.cli.replay.figures import Condition, Figures, condition, figures
from workers.cli.replay.fit import answered, fitted
from workers.cli.replay.run import Replay, Result
from workers.cli.replay.servers import UNBOUNDED, Speed
from workers.shared.recording.limits import MISSING
from workers.shared.recording.unreadable import Unreadable

REQUESTS_MAX: Final = 1_000_000
BASE: Final = "recorded configuration"


class Recorded(NamedTuple):
    """A recording: its requests in the order of arrival, and the endpoints that it names, with their speeds."""

    requests: list[Traced]
    members: list[Member]
    speeds: list[Speed]
    trace: Trace


@click.command("replay")
@click.argument("trace")
@click.option("--base", default="", help="The recorded configuration. [default: the built-in one]")
@click.option("--config", "configs", multiple=True, help="A configuration to compare. Give it once for each.")
@click.option(
    "--endpoints", type=Whole(1, 4096), help="What if there were this many endpoints, like the recorded ones?"
)
@click.option("--rate", type=click.FloatRange(0.01, 100), default=1.0, help="What if requests came this much faster?")
@click.option("--slots", type=Whole(1), help="What if each endpoint ran this many requests at once?")
@click.option(
    "--fail-if",
    "fail_if",
    default="",
    help="Exit with code 1 if this holds for a --config, as in 'ttft_p95 > 1.1 * base'.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@plugin_path_option
@experimental_option
def command(
    trace: str,
    base: str,
    configs: tuple[str, ...],
    endpoints: int | None,
    rate: float,
    slots: int | None,
    fail_if: str,
    as_json: bool,
    plugin_path: str,
    allow_experimental_plugins: bool,
) -> None:
    """Replay a recording in virtual time under other configurations. TRACE is a file or a folder of `epp record`.

    Model servers are fitted from the recording. The recorded configuration is replayed first, so that you see how far the model is from
    what was measured.

    Exit code 0: replayed; 1: --fail-if holds, or the recording cannot be used; 2: a configuration or condition is wrong.
    """
    limit = _condition(fail_if)
    add_plugins(plugin_path)
    loaded = {
        path: load_text(
            read_file(path), path, allow_experimental=allow_experimental_plugins, surroundings=Surroundings()
        )
        for path in configs
    }
    first = load_text(
        read_file(base) if base else None, base, allow_experimental=allow_experimental_plugins, surroundings=Surroundings()
    )  # fmt: skip
    try:
        recorded = _read(trace)
        _warn_of_another(first, recorded.trace)
        fit, measured = _as_recorded(recorded, first)
        changed = _what_if(recorded, endpoints, slots)
        targets, found = _replayed(changed, first, rate, None)
        others = {name: _replayed(changed, config, rate, targets)[1] for name, config in loaded.items()}
    except (Unreadable, ValueError) as wrong:
        raise click.ClickException(str(wrong)) from wrong
    except (OfflineError, PluginFault) as wrong:
        raise BadConfiguration(str(wrong)) from wrong
    if as_json:
        click.echo(msgspec.json.encode(_document(recorded, measured, fit, found, others)))
    else:
        click.echo("\n".join(_lines(recorded, measured, fit, found, others)))
    if limit is not None and (failed := [name for name, each in others.items() if limit.holds(each, found)]):
        click.echo(f"--fail-if '{fail_if}' holds for {', '.join(failed)}", err=True)
        raise SystemExit(1)


def _condition(text: str) -> Condition | None:
    try:
        return condition(text) if text else None
    except ValueError as wrong:
        raise click.UsageError(f"--fail-if: {wrong}") from wrong


def _read(path: str) -> Recorded:
    """Reads a recording and fits the servers. Raises Unreadable, or ValueError if it has too little."""
    try:
        from workers.shared.recording.reader import batches_of
    except ModuleNotFoundError as missing:
        raise click.ClickException(MISSING) from missing
    trace, requests = Trace(), []
    for batch in batches_of(path, lambda problem: click.echo(f"warning: {problem}", err=True)):
        requests += [found for record in batch if (found := trace.add(record)) is not None]
        if len(requests) > REQUESTS_MAX:
            raise Unreadable(f"{path}: more than {REQUESTS_MAX} requests: give one file of the folder")
    requests += trace.unfinished()
    requests.sort(key=lambda request: request.decided.at)
    members = {member.slot: member for member in trace.members.values()}
    speeds = fitted(requests, trace, members)
    return Recorded(requests, list(members.values()), [speeds[slot] for slot in members], trace)


def _warn_of_another(config: EffectiveConfig, trace: Trace) -> None:
    """Warns if the scorers of the recording are not those of the configuration that is to stand for it."""
    ours = {
        p.name: {(s.name, w) for s, w in p.members if isinstance(s, Scorer)} for p in config.pipeline.recipe.profiles
    }
    for recorded in trace.configs.values():
        theirs = {p.name: {(name, weight) for name, weight, _ in p.scorers} for p in recorded.profiles}
        if ours != theirs:
            click.echo(
                "warning: the recording has other profiles or weights than --base; give its own configuration", err=True
            )


def _as_recorded(recorded: Recorded, config: EffectiveConfig) -> tuple[Figures, Figures]:
    """Returns the figures of the recorded traffic as replayed and as measured, over the requests whose answers were recorded whole."""
    places = {member.slot: place for place, member in enumerate(recorded.members)}
    measured = [
        Result(places.get(ended.slot, -1), ended.first_s, ended.prompt or 0, ended.cached or 0)
        if (ended := request.ended) is not None and answered(request)
        else Result(-1, 0.0, 0, 0)
        for request in recorded.requests
    ]
    replayed = Replay(config, recorded.requests, recorded.members, recorded.speeds, 1.0).run()
    whole = [number for number, each in enumerate(measured) if each.target >= 0]
    targets = [measured[number].target for number in whole]
    size = len(recorded.members)
    return (
        _figures([replayed[number] for number in whole], targets, size),
        _figures(measured, [each.target for each in measured], size),
    )


def _what_if(recorded: Recorded, endpoints: int | None, slots: int | None) -> Recorded:
    """Returns the recording with another number of endpoints, or of slots. Further endpoints copy the recorded ones in turn."""
    members, speeds = recorded.members, recorded.speeds
    size = len(members) if endpoints is None else endpoints
    more = [
        msgspec.structs.replace(members[i % len(members)], name=f"{members[i % len(members)].name}-{i}")
        if i >= len(members)
        else members[i]
        for i in range(size)
    ]
    fast = [speeds[i % len(speeds)] for i in range(size)]
    if slots is not None:
        fast = [msgspec.structs.replace(speed, slots=slots) for speed in fast]
    return recorded._replace(members=more, speeds=fast)


def _replayed(
    recorded: Recorded, config: EffectiveConfig, rate: float, base: Sequence[int] | None
) -> tuple[list[int], Figures]:
    results = Replay(config, recorded.requests, recorded.members, recorded.speeds, rate).run()
    targets = [each.target for each in results]
    return targets, _figures(results, targets if base is None else base, len(recorded.members))


def _figures(results: Sequence[Result], base: Sequence[int], endpoints: int) -> Figures:
    served = [each for each in results if each.target >= 0]
    cached, prompt = sum(each.cached for each in served), sum(each.prompt for each in served)
    return figures([e.first_s for e in served], cached, prompt, [e.target for e in results], base, endpoints)


def _document(
    recorded: Recorded, measured: Figures, fit: Figures, base: Figures, others: dict[str, Figures]
) -> dict[str, object]:
    servers = {member.name: speed for member, speed in zip(recorded.members, recorded.speeds, strict=True)}
    return {"servers": servers, "measured": measured, "fit": fit, "base": base, "configs": others}


def _lines(recorded: Recorded, measured: Figures, fit: Figures, base: Figures, others: dict[str, Figures]) -> list[str]:
    lines = ["server                    overhead ms  prefill us/token  decode ms/token     slots  cache tokens"]
    for member, speed in zip(recorded.members, recorded.speeds, strict=True):
        slots, cache = (str(n) if n < UNBOUNDED else "unbounded" for n in (speed.slots, speed.cache_tokens))
        lines.append(
            f"{member.name:24} {1e3 * speed.overhead_s:12.1f} {1e6 * speed.prefill_s:17.1f} {1e3 * speed.decode_s:16.1f} "
            f"{slots:>9} {cache:>13}"
        )
    off = [100 * (getattr(fit, name) / getattr(measured, name) - 1) for name in ("ttft_p50", "ttft_p95")]
    lines += [
        "",
        "                                requests  errors  first token ms: mean   p50    p95    p99   hit rate  load  moved",
    ]
    rows = {"measured": measured, "replayed as recorded": fit, BASE: base, **others}
    for name, each in rows.items():
        times = np.array([each.ttft_mean, each.ttft_p50, each.ttft_p95, each.ttft_p99]) * 1e3
        lines.append(
            f"{name[-30:]:30} {each.requests:9} {each.errors:7} {'':15}"
            + "".join(f"{ms:7.0f}" for ms in times)
            + f"{each.hit_rate:10.1%} {each.load:6.2f} {each.moved:6.1%}"
        )
    lines.append(
        f"the model's error under the recorded configuration: p50 {off[0]:+.0f} %, p95 {off[1]:+.0f} %; it may be larger under others"
    )
    return lines
