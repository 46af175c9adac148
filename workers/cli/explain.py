"""`epp explain`: why a request went where it went."""

import traceback
import urllib.error
import urllib.parse
import urllib.request
from functools import partial

import click
import msgspec

from epp.config import EffectiveConfig, Surroundings
from epp.errors import PluginFault
from epp.explain import Explanation
from epp.isolation import culprit
from workers import explain_view, offline
from workers.cli.configuration import add_plugins, load_text, plugin_path_option, read_bytes, read_file
from workers.cli.flags import BadConfiguration
from workers.decisions_page import decoded, encoded
from workers.object_kinds import Found, together
from workers.objects import Folder
from workers.yaml_files import DiscoveryError

TIMEOUT_S = 5.0


@click.command("explain")
@click.option("--last", is_flag=True, help="The newest decision (the default).")
@click.option("--n", "count", type=click.IntRange(1), default=1, show_default=True, help="So many, newest first.")
@click.option("--request-id", default="", help="The decision on the request with this x-request-id.")
@click.option(
    "--url", default="http://127.0.0.1:9090", show_default=True, envvar="EPP_URL", help="The picker's metrics port."
)
@click.option(
    "--request", "request_file", default="", help="Offline: a request's JSON body in a file (- for standard input)."
)
@click.option("--endpoints-file", default="", help="Offline: endpoints, with what is known of them.")
@click.option("--config-file", "-c", default="", help="Offline: the configuration. [default: the built-in one]")
@click.option("--path", default="/v1/completions", show_default=True, help="Offline: the request's path.")
@click.option("--header", "-H", "headers", multiple=True, help="Offline: a header as name:value; may be repeated.")
@click.option("--objects-dir", default="", help="Offline: a folder with objectives and model rewrites.")
@click.option("--allow-experimental-plugins", is_flag=True, help="Offline: accept experimental plugin types.")
@plugin_path_option
@click.option("--json", "as_json", is_flag=True, help="JSON, as the picker's /debug/decisions has it.")
def command(
    last: bool,
    count: int,
    request_id: str,
    url: str,
    request_file: str,
    endpoints_file: str,
    config_file: str,
    path: str,
    headers: tuple[str, ...],
    objects_dir: str,
    allow_experimental_plugins: bool,
    plugin_path: str,
    as_json: bool,
) -> None:
    """Explain a decision: what each filter dropped, what each scorer said times its weight, the runner-up and the margin.

    Of a running picker (its workers remember their last 32 decisions each), or offline with --request and --endpoints-file,
    through the same code.

    Exit code 0: explained; 1: no such decision, no picker there, or a plugin fails; 78: a file is wrong.
    """
    if last and request_id:
        raise click.UsageError("--last and --request-id exclude each other")
    if bool(request_file) != bool(endpoints_file):
        raise click.UsageError("offline needs both, --request and --endpoints-file")
    if request_file:
        config = _config(config_file, allow_experimental_plugins, plugin_path)
        asked = offline.Asked(path, _headers(headers), read_bytes(request_file))
        found = [_offline(config, asked, endpoints_file, objects_dir)]
    else:
        found = _live(url, request_id, count)
    if as_json:
        click.echo(encoded(found), nl=False)
        return
    for number, explanation in enumerate(found):
        click.echo(("\n" if number else "") + "\n".join(explain_view.lines(explanation)))


def _live(url: str, request_id: str, count: int) -> list[Explanation]:
    asked = urllib.parse.urlencode({"request_id": request_id} if request_id else {"n": count})
    page = f"{url.rstrip('/')}/debug/decisions?{asked}"
    if not page.startswith(("http://", "https://")):
        raise click.UsageError(f"--url {url} is no http or https address")
    try:
        with urllib.request.urlopen(page, timeout=TIMEOUT_S) as answer:
            found = decoded(answer.read())
    except urllib.error.HTTPError as refused:
        raise click.ClickException(f"{page}: {refused.read().decode(errors='replace').strip() or refused}") from refused
    except (OSError, msgspec.MsgspecError) as failed:
        why = getattr(failed, "reason", failed)  # of an URLError, which says it in brackets
        raise click.ClickException(
            f"{page}: {getattr(why, 'strerror', None) or why}; --url names a picker's metrics port"
        ) from failed
    if not found:
        what = f"no worker remembers request {request_id}" if request_id else "no decision was made yet"
        raise click.ClickException(what)
    return found


def _config(path: str, allow_experimental: bool, plugin_path: str) -> EffectiveConfig:
    add_plugins(plugin_path)
    text = read_file(path) if path else ""
    return load_text(text, path, allow_experimental=allow_experimental, around=Surroundings())


def _offline(config: EffectiveConfig, asked: offline.Asked, endpoints_file: str, objects_dir: str) -> Explanation:
    try:
        given = Folder(objects_dir, report=partial(click.echo, err=True)).load() if objects_dir else Found()
        return offline.decided(config, asked, endpoints_file, together(given, Found(), lambda *_: None))
    except (offline.Wrong, DiscoveryError) as wrong:
        raise BadConfiguration(str(wrong)) from wrong
    except Exception as failed:  # a plugin's code: its author wants the place, not the way to it
        if (plugin := culprit(failed)) is None:
            raise
        at = traceback.extract_tb(failed.__traceback__)[-1]
        where = "" if isinstance(failed, PluginFault) else f" ({at.filename}:{at.lineno})"
        raise click.ClickException(
            f"plugin '{plugin.name}' fails: {type(failed).__name__}: {failed}{where}"
        ) from failed


def _headers(given: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for header in given:
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            raise click.UsageError(f"--header '{header}' is not of the form name:value")
        found[name.strip().lower()] = value.strip()
    return found
