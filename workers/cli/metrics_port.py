"""Finds the metrics port of a picker and gets its pages, for commands that ask a running picker."""

import http.client
import ssl
import urllib.error
import urllib.request
from typing import NamedTuple

import click

from shm import observe
from shm.segment import SegmentError
from workers.cli import which

TIMEOUT_S = 5.0


class Port(NamedTuple):
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
            raise unusable(url, _why(failed, url)) from failed
        return data


def at(url: str, ca_file: str) -> Port:
    """Returns the metrics port at a URL or host:port. Raises UsageError."""
    whole = url if "://" in url else f"{'https' if ca_file else 'http'}://{url}"
    if not whole.startswith(("http://", "https://")):
        raise click.UsageError(f"--url {url} is not host:port, http://... or https://...")
    if ca_file and not whole.startswith("https://"):
        raise click.UsageError(f"--ca-file is for TLS, but --url {url} has none: write https://")
    return Port(whole.rstrip("/"), ca_file)


def of(seen: observe.Seen, ca_file: str) -> Port:
    """Returns the metrics port of a picker on this machine."""
    return at(f"127.0.0.1:{seen.ports.get('metrics', observe.METRICS_PORT)}", ca_file)._replace(secret=seen.secret)


def found(run_dir: str, metrics_port: int | None, instance: str, ca_file: str) -> Port:
    """Returns the metrics port of a picker on this machine, found as `epp top` finds it. Raises ClickException."""
    try:
        return of(which.find(run_dir, metrics_port, instance), ca_file)
    except SegmentError as refused:
        raise click.ClickException(f"{refused}; or give --url of a metrics port") from refused


def unusable(url: str, why: str) -> click.ClickException:
    """Returns the error for a page that cannot be used."""
    return click.ClickException(f"{url}: {why}; --url must name a picker's metrics port")


def _why(failed: Exception, url: str) -> str:
    """Describes why a connection failed, and which flag helps."""
    why = getattr(failed, "reason", failed)  # an URLError puts its cause in brackets
    if isinstance(why, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({why.verify_message}): give --ca-file"
    if isinstance(why, (http.client.HTTPException, ConnectionResetError)) and url.startswith("http:"):
        return "no HTTP without TLS (if the picker has --metrics-cert-dir, give --ca-file or https://)"
    return str(getattr(why, "strerror", None) or why)
