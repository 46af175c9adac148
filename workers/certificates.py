"""The certificate of a port, followed in each process that serves it.

Made by the parent before it forks. Each child then looks at the files on its own, once a second, by `stat`:

    unchanged ──▶ nothing
    changed   ──▶ wait until they stay the same for a turn (who writes two files writes one first)
              ──▶ read, check, make a new context; it takes the place of the old one for connections that begin from now on
              ──▶ anything wrong: the old one stays, the cause is said once, and the same files are tried again at times

Why polling: it takes 13 us a second; it sees what inotify on a directory does not (the folder behind a symlink is swapped, as
Kubernetes does for ConfigMaps and Secrets; a network file system); and a worker has no thread that could wait for events. A
child that starts late compares with what the parent had read, so the successor of a killed worker doesn't serve an old pair.

Invariants: the pair and the CA of clients are taken together or not at all; a pair that has expired, or is not valid yet, never
replaces another; connections keep what they began with. Certificates live in wall time: it comes in as an argument.

What this does not do: end connections whose certificate has been replaced.
"""

import asyncio
import datetime
import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from workers.transport import tls
from workers.transport.tls import Settings, TlsError

if TYPE_CHECKING:
    from workers.cli.options import Options

POLL_S = 1.0
TRIED_AGAIN_TURNS = 10  # reading a pair takes 1 ms, in which a worker does nothing else
DAY_S = 86_400.0
WARNED_BEFORE_S = 7 * DAY_S
CIPHERS_13 = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")  # always on, as in Go
CIPHERS = {  # TLS 1.2 suites by their IANA names
    f"TLS_{exchange}_WITH_{iana}": f"{exchange.replace('_', '-')}-{openssl}"
    for exchange in ("ECDHE_ECDSA", "ECDHE_RSA")
    for iana, openssl in (
        ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
        ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
        ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
    )
}
Signature = tuple[tuple[int, ...] | None, ...]

log = structlog.get_logger()


class CurrentContext(ssl.SSLContext):
    """What a server is given once: each connection gets the context that is current when it begins."""

    current: ssl.SSLContext

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self.current.wrap_bio(*args, **kwargs)


class Certificates:
    """What one port shows, and whom it accepts. Raises TlsError where there is nothing to start with."""

    def __init__(self, settings: Settings, *, reload: bool) -> None:
        self._settings = settings
        self._reload = reload and bool(settings.files)
        self._loaded = self._seen = signature(settings.files)
        self.material = tls.read(settings)
        self.context = CurrentContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.current = tls.server_context(settings, self.material)
        self._valid_from, self._valid_until = self.material.validity()
        self._failure: tuple[Signature, str] | None = None
        self._turns_left = 0  # until files that failed are tried again
        self._warned_at = 0.0
        self._speaks = True
        self._timer: asyncio.TimerHandle | None = None

    def follow(self, loop: asyncio.AbstractEventLoop, *, speaks: bool, wall: Callable[[], float] = time.time) -> None:
        """In a child, before it serves: from now on, once a second. `speaks`: one process of several that see the same."""
        self._speaks = speaks
        if self._reload and (found := signature(self._settings.files)) != self._loaded:
            self._seen = found
        self._turn(loop, wall)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def poll(self, now: float) -> None:
        """One look at the files, and at the calendar."""
        if self._reload:
            found = signature(self._settings.files)
            self._turns_left -= 1
            if found != self._seen:
                self._seen, self._turns_left = found, 0
            elif found != self._loaded and self._turns_left <= 0:
                self._turns_left = TRIED_AGAIN_TURNS
                self._replace(found, now)
        self._watch_calendar(now)

    def _turn(self, loop: asyncio.AbstractEventLoop, wall: Callable[[], float]) -> None:
        self._timer = loop.call_later(POLL_S, self._turn, loop, wall)
        self.poll(wall())

    def _replace(self, found: Signature, now: float) -> None:
        try:
            material = tls.read(self._settings)
            context = tls.server_context(self._settings, material)
            valid_from, valid_until = material.validity()
            self._check_validity(valid_from, valid_until, now)
        except TlsError as wrong:
            if self._failure != (found, str(wrong)):
                self._failure = (found, str(wrong))
                self._say(log.error, "certificate not replaced, the old one stays in use", why=str(wrong))
            return
        if signature(self._settings.files) != found:
            return  # written to meanwhile: the next turn sees it
        self._loaded, self._failure = found, None
        if material == self.material:
            return
        self.material, self.context.current = material, context
        self._valid_from, self._valid_until, self._warned_at = valid_from, valid_until, 0.0
        self._say(log.info, "certificate replaced", files=self._names(), not_after=iso(valid_until))

    def _check_validity(self, valid_from: float, valid_until: float, now: float) -> None:
        if valid_until <= now:
            raise TlsError(f"{self._names()}: the certificate has expired, on {iso(valid_until)}; renew it")
        if valid_from > now:
            raise TlsError(
                f"{self._names()}: the certificate is not valid before {iso(valid_from)}; "
                "it is taken then, or correct this machine's clock"
            )

    def _watch_calendar(self, now: float) -> None:
        if self._valid_from <= now < self._valid_until - WARNED_BEFORE_S or now - self._warned_at < DAY_S:
            return
        self._warned_at = now
        if now >= self._valid_until:
            self._say(log.error, "certificate has expired", files=self._names(), not_after=iso(self._valid_until))
        elif now < self._valid_from:
            self._say(log.error, "certificate is not valid yet", files=self._names(), not_before=iso(self._valid_from))
        else:
            days = round((self._valid_until - now) / DAY_S, 1)
            self._say(
                log.warning,
                "certificate expires soon",
                files=self._names(),
                days=days,
                not_after=iso(self._valid_until),
            )

    def _names(self) -> str:
        return ", ".join(str(path) for path in self._settings.files) or "self-signed"

    def _say(self, write: Callable[..., Any], event: str, **fields: str | float) -> None:
        if self._speaks:
            write(event, **fields)


def signature(files: tuple[Path, ...]) -> Signature:
    """What changes when a file is written, replaced, or reached by another link; None for one that is not there."""
    found: list[tuple[int, ...] | None] = []
    for path in files:
        try:
            seen = os.stat(path)
            found.append((seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns))
        except OSError:
            found.append(None)
    return tuple(found)


def iso(wall: float) -> str:
    """Wall time as certificates show it."""
    return datetime.datetime.fromtimestamp(wall, datetime.UTC).isoformat().replace("+00:00", "Z")


def of_ext_proc(options: "Options") -> Certificates | None:
    """Of the ext_proc port; None without TLS. Raises TlsError."""
    if not options.secure_serving:
        return None
    chosen = [name for name in options.tls_cipher_suites if name not in CIPHERS_13]
    unknown = [name for name in chosen if name not in CIPHERS]
    if unknown:
        known = ", ".join((*CIPHERS, *CIPHERS_13))
        raise TlsError(f"--tls-cipher-suites: {', '.join(unknown)} unknown; known are {known}")
    without_12 = bool(options.tls_cipher_suites) and not chosen
    settings = Settings(
        directory=Path(options.cert_path) if options.cert_path else None,
        client_ca=Path(options.client_ca_file) if options.client_ca_file else None,
        min_version="1.3" if without_12 or options.tls_min_version == "VersionTLS13" else "1.2",
        ciphers=":".join(CIPHERS[name] for name in chosen) or None,
    )
    return Certificates(settings, reload=options.enable_cert_reload)


def of_metrics(options: "Options") -> Certificates | None:
    """Of the metrics port; None without TLS. Raises TlsError."""
    if not options.metrics_cert_dir:
        return None
    settings = Settings(
        directory=Path(options.metrics_cert_dir),
        client_ca=Path(options.metrics_client_ca_file) if options.metrics_client_ca_file else None,
        protocol="http/1.1",
        directory_flag="--metrics-cert-dir",
        client_ca_flag="--metrics-client-ca-file",
    )
    return Certificates(settings, reload=True)
