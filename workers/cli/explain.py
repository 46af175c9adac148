"""`epp explain`: explains why a request was sent to its endpoint."""

import time
import traceback
import urllib.parse
from collections.abc import Sequence

import click
import msgspec

from epp.config.load import EffectiveConfig, Surroundings
from epp.decision.explain import Explanation
from epp.errors import PluginFault
from epp.points.isolation import culprit
from epp.request.paths import inferred_path
from workers.cli import explain_recorded, explain_view, offline
from workers.cli.configuration import add_plugins, experimental_option, load_text, plugin_path_option, read_bytes, read_file, shown_path
from workers.cli.explain_recorded import Wanted, wanted_options
from workers.cli.explain_trace import found as found_in_trace
from workers.cli.explain_trace import why_then, with_config
from workers.cli.flags import BadConfiguration, Whole, WithArguments
from workers.cli.metrics_port import MetricsPort
from workers.cli.output import echo, echo_lines, echo_text
from workers.cli.which import Named, port_options
from workers.host.yaml_files import DiscoveryError
from workers.shared.recording import Unreadable
from workers.shared.recording.reader import batches_of
from workers.supervisor.kube.object_files import Folder
from workers.supervisor.kube.object_kinds import Found, merge
from workers.supervisor.pages.decisions import Opened, decoded, encoded


@click.command("explain", cls=WithArguments)
@click.argument("receipt", default="")
@click.option("--last", is_flag=True, help="The newest decision (the default).")
@click.option("--n", "count", type=Whole(1), default=1, show_default=True, help="How many decisions to show, newest first.")
@wanted_options
@port_options
@click.option("--request", "request_file", default="", help="Offline: a request's JSON body in a file (- for standard input).")
@click.option("--trace", default="", help="Explain a decision of this recording, a file or a folder; needs --id.")
@click.option("--id", "wanted_id", default="", help="With --trace: the x-request-id or number of a request.")
@click.option("--endpoints-file", default="", help="Offline: a file with endpoints and their values.")
@click.option("--config-file", "-c", default="", help="Offline: the configuration file. [default: the built-in one]")
@click.option("--path", default="", help="Offline: the request's path. [default: by the fields of its body]")
@click.option("--header", "-H", "headers", multiple=True, help="Offline: a header as name:value; may be repeated.")
@click.option("--objects-dir", default="", help="Offline: a folder with objectives and model rewrites.")
@experimental_option
@plugin_path_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as the picker's page /debug/decisions does.")
def command(
    receipt: str,
    last: bool,
    count: int,
    wanted: Wanted,
    picker: Named,
    request_file: str,
    trace: str,
    wanted_id: str,
    endpoints_file: str,
    config_file: str,
    path: str,
    headers: tuple[str, ...],
    objects_dir: str,
    allow_experimental_plugins: bool,
    plugin_path: str,
    as_json: bool,
) -> None:
    """Explain a decision: the endpoints that each filter dropped, the scores times their weights, the runner-up and the margin.

    The decision is one of a running picker. Each worker keeps its last 32 decisions; if there are several pools, the last 32 of each. Older
    decisions come from the picker's recording, which has a sample of the requests, those that failed, and the slowest. With RECEIPT, the
    header x-llm-d-receipt of a response to a request with `x-llm-d-debug: receipt`, the decision is the one that the receipt names; the
    picker opens the receipt with its secret. With --request and --endpoints-file, the decision is made offline by the same code. With
    --trace, the decision is a recorded one; then --config-file says where another configuration would send the request at that moment.

    Exit code 0: explained; 1: there is no such decision or no picker, or a plugin fails; 78: a file is invalid.
    """
    if sum(map(bool, (receipt, last, wanted.request_id, request_file, trace))) > 1:
        raise click.UsageError("give only one of RECEIPT, --last, --request-id, --request and --trace")
    if bool(request_file) != bool(endpoints_file):
        raise click.UsageError("an offline decision needs both --request and --endpoints-file")
    if bool(trace) != bool(wanted_id):
        raise click.UsageError("a recorded decision needs both --trace and --id; a receipt is given without an option")
    if receipt:
        _show_receipt(picker.port(), receipt, as_json=as_json)
        return
    if trace:
        config = _config(config_file, allow_experimental_plugins, plugin_path) if config_file else None
        explanations = _traced(trace, wanted_id, config)
    elif request_file:
        config = _config(config_file, allow_experimental_plugins, plugin_path)
        body = read_bytes(request_file)
        request = offline.OfflineRequest(path or inferred_path(body), _headers(headers), body)
        explanations = [_offline(config, request, endpoints_file, objects_dir)]
    else:
        explanations = _live(picker.port(), wanted, count)
    if as_json:
        echo_text(encoded(explanations), nl=False)
        return
    _tell(explanations, f"with {config_file} at the same moment:" if trace else "")


def _tell(explanations: Sequence[Explanation], title: str) -> None:
    """Prints explanations. `title`: a line above each of them but the first; "" for none."""
    for number, explanation in enumerate(explanations):
        if number:
            echo()
            echo_lines([title] if title else [])
        echo_lines(explain_view.lines(explanation))


def _show_receipt(port: MetricsPort, receipt: str, *, as_json: bool) -> None:
    """Prints the content of a receipt, and the decision if a worker remembers it."""
    path = f"/debug/receipt?{urllib.parse.urlencode({'id': receipt})}"
    if as_json:
        echo_text(port.page(path), nl=False)
    else:
        echo_lines(explain_view.receipt_lines(port.read(path, msgspec.json.Decoder(Opened).decode)))


def _traced(path: str, wanted: str, config: EffectiveConfig | None) -> list[Explanation]:
    """Explains a recorded decision, and the decision of `config` at the same moment. Raises ClickException."""
    try:
        request, trace = found_in_trace(batches_of(path, lambda problem: echo(f"warning: {problem}", err=True)), wanted)
        explanations = [why_then(request, trace)]
        if config is not None:
            explanations.append(with_config(config, request, trace))
    except Unreadable as wrong:
        raise click.ClickException(str(wrong)) from wrong
    except offline.OfflineError as wrong:
        raise BadConfiguration(str(wrong)) from wrong
    return explanations


def _live(port: MetricsPort, wanted: Wanted, count: int) -> list[Explanation]:
    """Returns decisions that workers remember or that are recorded. For a wanted time, recorded decisions come first, because the recording
    has their outcome. Otherwise the workers' decisions come first, because they are newer. Raises ClickException.
    """
    if wanted.at is not None:
        try:
            return explain_recorded.explained(port, wanted, count)
        except click.ClickException:
            if found := _remembered(port, wanted, count):
                return found
            raise
    found = _remembered(port, wanted, count)
    if found:
        return found
    if wanted == Wanted(pool=wanted.pool):
        where = f" in pool {wanted.pool}, or workers remember only later ones of other pools" if wanted.pool else ""
        raise click.ClickException(f"no decision was made yet{where}")
    return explain_recorded.explained(port, wanted, 1 if wanted.request_id else count)


def _remembered(port: MetricsPort, wanted: Wanted, count: int) -> list[Explanation]:
    one, last, pool = {"request_id": wanted.request_id}, {"n": count}, {"pool": wanted.pool} if wanted.pool else {}
    query = urllib.parse.urlencode(pool | (one if wanted.request_id else last if wanted == Wanted(pool=wanted.pool) else {}))
    explanations = port.read(f"/debug/decisions?{query}", decoded)
    return wanted.remembered(explanations, time.time())[:count]


def _config(path: str, allow_experimental: bool, plugin_path: str) -> EffectiveConfig:
    add_plugins(plugin_path)
    text = read_file(path) if path else None
    return load_text(text, shown_path(path), allow_experimental=allow_experimental, surroundings=Surroundings())


def _offline(config: EffectiveConfig, request: offline.OfflineRequest, endpoints_file: str, objects_dir: str) -> Explanation:
    try:
        folder = Folder(objects_dir, report=lambda _event, place, reason: echo(f"{place}: {reason}", err=True))
        objects = folder.load()[0] if objects_dir else Found()
        return offline.decided(config, request, endpoints_file, merge(objects, Found(), lambda *_: None))
    except (offline.OfflineError, DiscoveryError) as error:
        raise BadConfiguration(str(error)) from error
    except Exception as failed:  # the author of a plugin needs the failing line, not a stack trace
        if (plugin := culprit(failed)) is None:
            raise
        at = traceback.extract_tb(failed.__traceback__)[-1]
        where = "" if isinstance(failed, PluginFault) else f" ({at.filename}:{at.lineno})"
        raise click.ClickException(f"plugin '{plugin.name}' fails: {type(failed).__name__}: {failed}{where}") from failed


def _headers(headers: tuple[str, ...]) -> dict[str, str]:
    parsed = {}
    for header in headers:
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            raise click.UsageError(f"--header '{header}' is not of the form name:value")
        parsed[name.strip().lower()] = value.strip()
    return parsed
