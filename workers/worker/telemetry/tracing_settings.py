"""Reads the standard OTEL_* variables, which choose exporter and sampler, or switch traces off.

The parent reads them once, so that all errors appear before the first fork. This module imports nothing of OpenTelemetry, because its SDK
starts a thread, and gRPC starts several.

    read here               OTEL_TRACES_EXPORTER, OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG, OTEL_SDK_DISABLED, and
                            OTEL_EXPORTER_OTLP_PROTOCOL, _TIMEOUT and _COMPRESSION (with their _TRACES_ forms)
    checked here,           OTEL_EXPORTER_OTLP_ENDPOINT, _CERTIFICATE, _CLIENT_KEY and _CLIENT_CERTIFICATE
    read by the SDK
    read by the SDK         OTEL_EXPORTER_OTLP_INSECURE and _HEADERS, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES
    without effect          OTEL_BSP_*
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import msgspec

from workers.host.options import TracingOptions

EXTRA = "endpoint-picker[otel]"
SAMPLER = "parentbased_traceidratio"
# Standard sampler -> the share of requests that it samples; None if OTEL_TRACES_SAMPLER_ARG gives the share.
SAMPLERS: Mapping[str, float | None] = {
    "always_on": 1.0,
    "always_off": 0.0,
    "traceidratio": None,
    "parentbased_always_on": 1.0,
    "parentbased_always_off": 0.0,
    "parentbased_traceidratio": None,
}
PARENT_BASED = "parentbased_"
EXPORTERS = ("console", "otlp")
RATIO = 0.1
TIMEOUT_MS = 10_000
COMPRESSIONS = ("none", "gzip")
FILES = ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
MODULES = {"console": ("opentelemetry.sdk.trace",), "otlp": ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc")}


def settings(environ: Mapping[str, str], installed: Callable[[str], Any] = find_spec) -> tuple[TracingOptions | None, list[str]]:
    """Returns the settings and a list of errors. The settings are None if traces are off or if there are errors."""
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporter in ("", "none") or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None, []
    errors: list[str] = []
    if exporter not in EXPORTERS:
        errors.append(f"OTEL_TRACES_EXPORTER '{exporter}' is not supported; use {', '.join(EXPORTERS)} or none")
    elif not _installed(exporter, installed):
        errors.append(
            f"OTEL_TRACES_EXPORTER={exporter} needs OpenTelemetry, which is not installed; pip install '{EXTRA}', or unset the variable"
        )
    sampler, ratio = _sampler(environ, errors)
    options = TracingOptions(exporter=exporter, ratio=ratio, parent_based=sampler.startswith(PARENT_BASED))
    if exporter == "otlp":
        options = _otlp(environ, options, errors)
    return (None if errors else options), errors


def _installed(exporter: str, installed: Callable[[str], Any]) -> bool:
    try:  # `find_spec` imports the parent packages, but these have no code
        return all(installed(module) is not None for module in MODULES[exporter])
    except ModuleNotFoundError:
        return False


def _sampler(environ: Mapping[str, str], errors: list[str]) -> tuple[str, float]:
    """Returns the name of the sampler and its share of requests. Adds to `errors`."""
    sampler = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or SAMPLER
    if sampler not in SAMPLERS:
        errors.append(f"OTEL_TRACES_SAMPLER '{sampler}' is not known; use one of {', '.join(SAMPLERS)}, or unset it")
    fixed = SAMPLERS.get(sampler)
    if fixed is not None:
        return sampler, fixed
    text = environ.get("OTEL_TRACES_SAMPLER_ARG", "") or str(RATIO)
    with contextlib.suppress(ValueError):
        if 0 <= (ratio := float(text)) <= 1:
            return sampler, ratio
    errors.append(f"OTEL_TRACES_SAMPLER_ARG '{text}' is not a number from 0 to 1; give the share of requests to trace")
    return sampler, RATIO


def _otlp(environ: Mapping[str, str], options: TracingOptions, errors: list[str]) -> TracingOptions:
    def setting(what: str, default: str) -> tuple[str, str]:
        """Returns the name of the variable that is set, and its value. The form with _TRACES_ wins."""
        names = (f"OTEL_EXPORTER_OTLP_TRACES_{what}", f"OTEL_EXPORTER_OTLP_{what}")
        return next(((name, value) for name in names if (value := environ.get(name, "").strip())), (names[1], default))

    name, protocol = setting("PROTOCOL", "grpc")
    if protocol != "grpc":
        errors.append(f"{name} '{protocol}' is not supported; use grpc, or unset it")
    name, compression = setting("COMPRESSION", "none")
    if compression not in COMPRESSIONS:
        errors.append(f"{name} '{compression}' is not supported; use {' or '.join(COMPRESSIONS)}")
    name, timeout = setting("TIMEOUT", str(TIMEOUT_MS))
    if not timeout.isdecimal() or not int(timeout):
        errors.append(f"{name} '{timeout}' is not a number of milliseconds above 0")
        timeout = str(TIMEOUT_MS)
    name, endpoint = setting("ENDPOINT", "")
    if endpoint and not _is_endpoint(endpoint):
        errors.append(f"{name} '{endpoint}' is not an http:// or https:// URL with a host; use for example http://localhost:4317")
    for what in FILES:
        name, path = setting(what, "")
        if path and not os.access(path, os.R_OK):
            errors.append(f"{name} '{path}' cannot be read; give a PEM file")
    return msgspec.structs.replace(options, timeout_s=int(timeout) / 1000, compression=compression)


def _is_endpoint(text: str) -> bool:
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        return url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        return False
