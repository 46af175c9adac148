"""Finds the picker that a command is about, from the options that name it, its metrics port with the pages, and one of its pools."""

import functools
import http.client
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import click
import msgspec

from epp.request.pool_choice import no_such_pool
from shm import observe
from shm.observe import Seen
from shm.segment import SegmentError
from workers.cli.flags import PORT, flag
from workers.cli.output import echo

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

TIMEOUT_S = 5.0
pool_option: Callable[[F], F] = click.option("--pool", default="", metavar="NAME", help="Show only this pool of several.  [default: all]")


class MetricsPort(NamedTuple):
    """A metrics port. `secret`: lets a process on the picker's machine see the private pages; "" on another machine."""

    url: str
    ca_file: str
    secret: str = ""

    def page(self, path: str, timeout_s: float = TIMEOUT_S) -> bytes:
        """Returns a page. Raises ClickException with the page, the cause and what to do."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file) if self.ca_file else None
        except OSError as failed:  # includes ssl.SSLError: no PEM
            raise click.ClickException(f"--ca-file {self.ca_file}: {failed.strerror or failed}") from failed
        url = self.url + path
        fields = {"Authorization": f"Bearer {self.secret}"} if self.secret else {}
        try:
            asked = urllib.request.Request(url, headers=fields)
            with urllib.request.urlopen(asked, timeout=timeout_s, context=context) as answer:
                data: bytes = answer.read()
        except urllib.error.HTTPError as refused:
            raise click.ClickException(f"{url}: {refused.read().decode(errors='replace').strip() or refused}") from refused
        except (OSError, http.client.HTTPException) as failed:
            raise _unusable(url, _why(failed, url)) from failed
        return data

    def read(self, path: str, decode: Callable[[bytes], T]) -> T:
        """Returns the decoded content of a page. Raises ClickException, also if `decode` finds no page of a picker."""
        data = self.page(path)
        try:
            return decode(data)
        except (msgspec.MsgspecError, KeyError, TypeError) as strange:
            raise _unusable(self.url + path, str(strange)) from strange


class Named(NamedTuple):
    """Which picker a command is about: a picker on this machine, or the picker with a metrics port at `url`; by default the only picker."""

    metrics_port: int | None = None
    instance: str = ""
    run_dir: str = observe.RUN_DIR
    url: str = ""
    ca_file: str = ""

    def find(self) -> Seen:
        """Returns the picker on this machine. On a terminal, asks which of several pickers. Raises SegmentError."""
        return observe.find(self.run_dir, metrics_port=self.metrics_port, name=self.instance, ask=_ask if _asks() else None)

    def port(self) -> MetricsPort:
        """Returns the metrics port. Raises ClickException, and UsageError if the URL is malformed."""
        if self.url:
            return at(self.url, self.ca_file)
        try:
            return of(self.find(), self.ca_file)
        except SegmentError as refused:
            raise click.ClickException(f"{refused}; or give --url of a metrics port") from refused


def picker_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that name a picker on this machine. The command gets a `Named`, as `picker`."""

    @flag("metrics-port", PORT, None, "The picker on this machine with this metrics port. [default: the only one that runs]")
    @flag("instance", str, "", "The picker on this machine with this name, whatever its ports are.")
    @flag("run-dir", str, observe.RUN_DIR, "Folder in which the picker keeps its file.")
    @functools.wraps(command)
    def named(*args: Any, metrics_port: int | None, instance: str, run_dir: str, url: str = "", ca_file: str = "", **others: Any) -> Any:
        return command(*args, picker=Named(metrics_port, instance, run_dir, url, ca_file), **others)

    return named


def port_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the same options, and options that name a metrics port, perhaps on another machine."""
    command = flag("ca-file", str, "", "PEM file with the CA of the metrics port's certificate; it then has to use TLS.")(command)
    return picker_options(flag("url", str, "", "Ask this metrics port instead: host:port, http://... or https://...")(command))


def at(url: str, ca_file: str) -> MetricsPort:
    """Returns the metrics port at a URL or host:port. Raises UsageError."""
    whole = url if "://" in url else f"{'https' if ca_file else 'http'}://{url}"
    if not whole.startswith(("http://", "https://")):
        raise click.UsageError(f"--url {url} is not host:port, http://... or https://...")
    if ca_file and not whole.startswith("https://"):
        raise click.UsageError(f"--ca-file is for TLS, but --url {url} has none: write https://")
    return MetricsPort(whole.rstrip("/"), ca_file)


def of(seen: observe.Seen, ca_file: str) -> MetricsPort:
    """Returns the metrics port of a picker on this machine."""
    return at(f"127.0.0.1:{seen.ports.get('metrics', observe.METRICS_PORT)}", ca_file)._replace(secret=seen.secret)


def _unusable(url: str, why: str) -> click.ClickException:
    return click.ClickException(f"{url}: {why}; --url must name a picker's metrics port")


def _why(failed: Exception, url: str) -> str:
    """Describes why a connection failed, and which flag helps."""
    why = getattr(failed, "reason", failed)  # an URLError puts its cause in brackets
    if isinstance(why, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({why.verify_message}): give --ca-file"
    if isinstance(why, (http.client.HTTPException, ConnectionResetError)) and url.startswith("http:"):
        return "no HTTP without TLS (if the picker has --metrics-cert-dir, give --ca-file or https://)"
    return str(getattr(why, "strerror", None) or why)


def _asks() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _ask(running: list[Seen]) -> Seen:
    for number, seen in enumerate(running, 1):
        echo(f"{number}  {seen}", err=True)
    chosen: int = click.prompt("which picker", type=click.IntRange(1, len(running)), err=True)
    return running[chosen - 1]


def check_pool(name: str, known: Sequence[str]) -> None:
    """Refuses the name of a pool that is not `known`: the names of the picker's pools, or no names if it has one pool. Raises
    UsageError.
    """
    if why := no_such_pool(name, known):
        raise click.UsageError(f"--pool: {why}")
