"""What the standard OTEL_* variables ask for: which exporter, which sample, or no traces at all.

Read by the parent, once, so that all that can be wrong is said before the first fork. Nothing of OpenTelemetry is imported
here: its SDK starts a thread, and gRPC several. Read here: OTEL_TRACES_EXPORTER, OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG,
OTEL_SDK_DISABLED, OTEL_EXPORTER_OTLP_PROTOCOL, _TIMEOUT and _COMPRESSION (with their _TRACES_ forms). The SDK reads
OTEL_EXPORTER_OTLP_ENDPOINT, _INSECURE, _HEADERS, _CERTIFICATE, _CLIENT_KEY and _CLIENT_CERTIFICATE, OTEL_SERVICE_NAME and
OTEL_RESOURCE_ATTRIBUTES; of these what names a host or a file is looked at. The OTEL_BSP_* variables change nothing.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import msgspec

EXTRA = "endpoint-picker[otel]"
SAMPLER = "parentbased_traceidratio"
EXPORTERS = ("console", "otlp")
RATIO = 0.1
TIMEOUT_MS = 10_000
COMPRESSIONS = ("none", "gzip")
FILES = ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
MODULES = {
    "console": ("opentelemetry.sdk.trace",),
    "otlp": ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc"),
}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment asks for."""

    exporter: str
    ratio: float = RATIO
    timeout_s: float = TIMEOUT_MS / 1000
    compression: str = "none"


def settings(
    environ: Mapping[str, str], installed: Callable[[str], Any] = find_spec
) -> tuple[Settings | None, list[str]]:
    """Settings, or None when no traces are asked for; and all that is wrong with them."""
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporter in ("", "none") or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None, []
    errors: list[str] = []
    if exporter not in EXPORTERS:
        errors.append(f"OTEL_TRACES_EXPORTER '{exporter}' is not supported; use {', '.join(EXPORTERS)} or none")
    elif not _installed(exporter, installed):
        errors.append(
            f"OTEL_TRACES_EXPORTER={exporter} needs OpenTelemetry, which is not installed; "
            f"pip install '{EXTRA}', or unset the variable"
        )
    ratio = _sampler(environ, errors)
    asked = Settings(exporter=exporter, ratio=ratio) if exporter != "otlp" else _otlp(environ, ratio, errors)
    return (None if errors else asked), errors


def _installed(exporter: str, installed: Callable[[str], Any]) -> bool:
    try:  # the packages above these have no code: looking for these imports none
        return all(installed(module) is not None for module in MODULES[exporter])
    except ModuleNotFoundError:
        return False


def _sampler(environ: Mapping[str, str], errors: list[str]) -> float:
    sampler = environ.get("OTEL_TRACES_SAMPLER", "") or SAMPLER
    if sampler != SAMPLER:
        errors.append(f"OTEL_TRACES_SAMPLER '{sampler}' is not supported; use {SAMPLER}, or unset it")
    text = environ.get("OTEL_TRACES_SAMPLER_ARG", "") or str(RATIO)
    with contextlib.suppress(ValueError):
        if 0 <= (ratio := float(text)) <= 1:
            return ratio
    errors.append(f"OTEL_TRACES_SAMPLER_ARG '{text}' is not a number from 0 to 1; give the share of requests to trace")
    return RATIO


def _otlp(environ: Mapping[str, str], ratio: float, errors: list[str]) -> Settings:
    def given(what: str, default: str) -> tuple[str, str]:
        names = (f"OTEL_EXPORTER_OTLP_TRACES_{what}", f"OTEL_EXPORTER_OTLP_{what}")
        return next(((name, value) for name in names if (value := environ.get(name, "").strip())), (names[1], default))

    name, protocol = given("PROTOCOL", "grpc")
    if protocol != "grpc":
        errors.append(f"{name} '{protocol}' is not supported; use grpc, or unset it")
    name, compression = given("COMPRESSION", "none")
    if compression not in COMPRESSIONS:
        errors.append(f"{name} '{compression}' is not supported; use {' or '.join(COMPRESSIONS)}")
    name, timeout = given("TIMEOUT", str(TIMEOUT_MS))
    if not timeout.isdecimal() or not int(timeout):
        errors.append(f"{name} '{timeout}' is not a number of milliseconds above 0")
        timeout = str(TIMEOUT_MS)
    name, endpoint = given("ENDPOINT", "")
    if endpoint and not _is_endpoint(endpoint):
        errors.append(f"{name} '{endpoint}' is no http:// or https:// URL of a host; for example http://localhost:4317")
    for what in FILES:
        name, path = given(what, "")
        if path and not os.access(path, os.R_OK):
            errors.append(f"{name} '{path}' cannot be read; give a PEM file")
    return Settings(exporter="otlp", ratio=ratio, timeout_s=int(timeout) / 1000, compression=compression)


def _is_endpoint(text: str) -> bool:
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        return url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        return False
