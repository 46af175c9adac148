"""A metrics port that a command asks for pages. This module is separate from `which`, because commands without a page need no HTTP
client.
"""

import ssl
import urllib.error
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import click

from epp.errors import UNREADABLE
from shm import observe
from workers.cli import http_page

T = TypeVar("T")

TIMEOUT_S = 5.0
PAGE_BYTES_MAX = 1 << 30


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
            return http_page.get(url, timeout_s, bytes_max=PAGE_BYTES_MAX, context=context, fields=fields).content
        except urllib.error.HTTPError as refused:
            raise click.ClickException(f"{url}: {refused.read().decode(errors='replace').strip() or refused}") from refused
        except OSError as failed:
            raise _unusable(url, _why(failed, url)) from failed

    def read(self, path: str, decode: Callable[[bytes], T]) -> T:
        """Returns the decoded content of a page. Raises ClickException, also if `decode` finds no page of a picker."""
        data = self.page(path)
        try:
            return decode(data)
        except (*UNREADABLE, KeyError, TypeError) as strange:
            raise _unusable(self.url + path, str(strange)) from strange


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
    if isinstance(why, (http_page.NoHttpError, ConnectionResetError)) and url.startswith("http:"):
        return "no HTTP without TLS (if the picker has --metrics-cert-dir, give --ca-file or https://)"
    return str(getattr(why, "strerror", None) or why)
