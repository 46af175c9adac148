"""Holds the certificate of a port, and reloads it in each process that serves the port.

The parent reads the certificate before it forks. Each child then checks the files with `stat` once per second:

    unchanged ──▶ do nothing
    changed   ──▶ wait until the files stay the same for one check, because two files cannot be written at once
              ──▶ read, check, and create a new context; new connections use it
              ──▶ on an error: keep the old context, log the cause once, and try the same files again every 10 s

Polling takes 13 us per second. Polling also finds changes that inotify on a directory misses: Kubernetes swaps the folder behind a symlink
for ConfigMaps and Secrets, and network file systems have no events. A child that starts late compares the files with those that the parent
has read, so the successor of a killed worker does not serve an old pair.

Invariants: the pair and the CA for clients are replaced together or not at all. A pair that has expired, or is not valid yet, never
replaces another one. A connection keeps the certificate with which it started. All validity times are in wall time, which the caller
passes.

This module does not close connections after their certificate was replaced.
"""

import datetime
import math
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
    import asyncio

    from workers.host.options import Options

POLL_S = 1.0
# After how many checks files that failed are read again. Not at each check, because reading a pair blocks a worker for 1 ms.
RETRY_POLLS = 10
DAY_S = 86_400.0
# A certificate expires soon if less than this is left, and less than this share of its validity: one for a day is renewed each day.
WARNED_BEFORE_S = 7 * DAY_S
WARNED_SHARE = 0.2
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
Say = Callable[[float, float], None]

log = structlog.get_logger()


def _say_nothing(_until: float, _soon_at: float) -> None:
    """Does nothing."""


class CurrentContext(ssl.SSLContext):
    """A context that can be replaced. Each new connection uses the context that is `current` at its start."""

    current: ssl.SSLContext

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self.current.wrap_bio(*args, **kwargs)


class Certificates:
    """Holds the certificate of one port, and the CA of the clients that the port accepts. Reloads them if `reload`.

    Raises TlsError if the files are unusable at the start.
    """

    def __init__(self, settings: Settings, *, reload: bool) -> None:
        self._settings = settings
        self._reload = reload and bool(settings.files)
        self._loaded = self._seen = signature(settings.files)
        self.material = tls.read(settings)
        self.context = CurrentContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.current = tls.server_context(settings, self.material)
        self._valid_from, self._valid_until = self.material.validity()
        self._failure: tuple[Signature, str] | None = None
        self._polls_left = 0  # checks until the next try of files that failed
        self._warned_at = -math.inf
        self._speaks = True
        self._say: Say = _say_nothing
        self._timer: asyncio.TimerHandle | None = None

    @property
    def valid_until(self) -> float:
        """Returns when the certificate in use becomes invalid, in seconds since the epoch."""
        return self._valid_until

    @property
    def soon_at(self) -> float:
        """Returns from when on the certificate in use expires soon, in seconds since the epoch."""
        return self._valid_until - min(WARNED_BEFORE_S, WARNED_SHARE * max(0.0, self._valid_until - self._valid_from))

    def follow(self, loop: "asyncio.AbstractEventLoop", *, speaks: bool, say: Say = _say_nothing) -> None:
        """In a child, before it serves: starts to check the files once per second.

        `speaks`: whether this process logs; True in one process only, because all of them see the same change. `say`: called with
        `valid_until` and `soon_at` at once and after each replacement of the certificate.
        """
        self._speaks = speaks
        self._say = say
        say(self._valid_until, self.soon_at)
        if self._reload and (files := signature(self._settings.files)) != self._loaded:
            self._seen = files
        self._turn(loop)

    def close(self) -> None:
        """Stops checking the files."""
        if self._timer is not None:
            self._timer.cancel()

    def poll(self, now: float) -> None:
        """Checks the files and the validity of the certificate once. `now`: seconds since the epoch."""
        if self._reload:
            files = signature(self._settings.files)
            self._polls_left -= 1
            if files != self._seen:
                self._seen, self._polls_left = files, 0
            elif files != self._loaded and self._polls_left <= 0:
                self._polls_left = RETRY_POLLS
                self._replace(files, now)
        self._watch_validity(now)

    def _turn(self, loop: "asyncio.AbstractEventLoop") -> None:
        self._timer = loop.call_later(POLL_S, self._turn, loop)
        self.poll(time.time())

    def _replace(self, files: Signature, now: float) -> None:
        try:
            material = tls.read(self._settings)
            context = tls.server_context(self._settings, material)
            valid_from, valid_until = material.validity()
            self._check_validity(valid_from, valid_until, now)
        except TlsError as wrong:
            if self._failure != (files, str(wrong)):
                self._failure = (files, str(wrong))
                self._log(log.error, "certificate not replaced, the old one stays in use", why=str(wrong))
            return
        if signature(self._settings.files) != files:
            return  # a file was written while this method read them; the next check notices it
        self._loaded, self._failure = files, None
        if material == self.material:
            return
        self.material, self.context.current = material, context
        self._valid_from, self._valid_until, self._warned_at = valid_from, valid_until, -math.inf
        self._say(valid_until, self.soon_at)
        self._log(log.info, "certificate replaced", files=self._names(), not_after=iso(valid_until))

    def _check_validity(self, valid_from: float, valid_until: float, now: float) -> None:
        if valid_until <= now:
            raise TlsError(f"{self._names()}: the certificate expired on {iso(valid_until)}; renew it")
        if valid_from > now:
            raise TlsError(
                f"{self._names()}: the certificate is not valid before {iso(valid_from)}; "
                "it will be used from then on; if it should be valid now, correct this machine's clock"
            )

    def _watch_validity(self, now: float) -> None:
        if self._valid_from <= now < self.soon_at or 0.0 <= now - self._warned_at < DAY_S:
            return
        self._warned_at = now
        if now >= self._valid_until:
            self._log(log.error, "certificate has expired", files=self._names(), not_after=iso(self._valid_until))
        elif now < self._valid_from:
            self._log(log.error, "certificate is not valid yet", files=self._names(), not_before=iso(self._valid_from))
        else:
            days = round((self._valid_until - now) / DAY_S, 1)
            self._log(log.warning, "certificate expires soon", files=self._names(), days=days, not_after=iso(self._valid_until))

    def _names(self) -> str:
        return ", ".join(str(path) for path in self._settings.files) or "self-signed"

    def _log(self, write: Callable[..., Any], event: str, **fields: str | float) -> None:
        if self._speaks:
            write(event, **fields)


def signature(files: tuple[Path, ...]) -> Signature:
    """Returns the state of each file, as `stat` shows it; None for a missing file.

    A state changes if the file is written, or if the file or a link to it is replaced.
    """
    states: list[tuple[int, ...] | None] = []
    for path in files:
        try:
            stat = os.stat(path)
            states.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
        except OSError:
            states.append(None)
    return tuple(states)


def iso(wall: float) -> str:
    """Formats a time as ISO 8601 in UTC. `wall`: seconds since the epoch."""
    return datetime.datetime.fromtimestamp(wall, datetime.UTC).isoformat().replace("+00:00", "Z")


def of_ext_proc(options: "Options") -> Certificates | None:
    """Returns the certificate of the ext_proc port, or None without TLS. Raises TlsError."""
    if not options.secure_serving:
        return None
    chosen = [name for name in options.tls_cipher_suites if name not in CIPHERS_13]
    unknown = [name for name in chosen if name not in CIPHERS]
    if unknown:
        known = ", ".join((*CIPHERS, *CIPHERS_13))
        raise TlsError(f"--tls-cipher-suites: unknown: {', '.join(unknown)}; give some of {known}")
    without_12 = bool(options.tls_cipher_suites) and not chosen
    settings = Settings(
        directory=Path(options.cert_path) if options.cert_path else None,
        client_ca=Path(options.client_ca_file) if options.client_ca_file else None,
        min_version="1.3" if without_12 or options.tls_min_version == "VersionTLS13" else "1.2",
        ciphers=":".join(CIPHERS[name] for name in chosen) or None,
    )
    return Certificates(settings, reload=options.enable_cert_reload)


def of_metrics(directory: str, client_ca: str) -> Certificates | None:
    """Returns the certificate of the metrics port, or None without TLS. Raises TlsError."""
    if not directory:
        return None
    settings = Settings(
        directory=Path(directory),
        client_ca=Path(client_ca) if client_ca else None,
        protocol="http/1.1",
        directory_flag="--metrics-cert-dir",
        client_ca_flag="--metrics-client-ca-file",
    )
    return Certificates(settings, reload=True)
