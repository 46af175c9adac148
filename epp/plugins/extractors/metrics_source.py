"""Where an endpoint's metrics page is: the parameters of the scrape, checked, and its address."""

import re
from typing import Annotated, Literal

import msgspec

from epp.plugin import DataSource, plugin
from epp.quantities import parse_duration

INTERVAL_S_MAX = 600.0  # older values say nothing of a server's load, and each tick has a bucket
_PATH = re.compile(r"/[!-~]*")


def parse_interval(text: str) -> float:
    """Seconds of a duration such as `50ms` or `1m30s`; ValueError says what is wrong."""
    try:
        seconds = parse_duration(text)
    except ValueError as problem:
        raise ValueError(f"interval: {problem}") from None
    if seconds < 0:
        raise ValueError(
            f"interval: '{text}' is negative; write for example 50ms, or leave it out for the flag's period"
        )
    return seconds


@plugin("metrics-data-source")
class MetricsDataSource(DataSource):
    """Scrapes `scheme://endpoint:port/path`; `interval_s` None means: the flag's period."""

    class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
        scheme: Literal["http", "https"] = "http"
        path: str = "/metrics"
        port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
        insecure_skip_verify: bool = True
        ca_cert_path: str = ""
        client_cert_path: str = ""
        client_key_path: str = ""
        interval: str | None = None

    def __init__(self, name: str, params: "MetricsDataSource.Params") -> None:
        super().__init__(name, params)
        self.scheme = params.scheme
        self.path = params.path if params.path.startswith("/") else f"/{params.path}"
        if not _PATH.fullmatch(self.path):
            raise ValueError(f"path: {params.path!r} has blanks or control characters; escape them")
        if bool(params.client_cert_path) != bool(params.client_key_path):
            given = "clientCertPath" if params.client_cert_path else "clientKeyPath"
            raise ValueError(f"{given}: clientCertPath and clientKeyPath go together; give both")
        self.port = params.port
        self.insecure_skip_verify = params.insecure_skip_verify
        self.ca_cert_path = params.ca_cert_path
        self.client_cert_path = params.client_cert_path
        self.client_key_path = params.client_key_path
        seconds = parse_interval(params.interval) if params.interval is not None else 0.0
        if seconds > INTERVAL_S_MAX:
            raise ValueError(f"interval: {params.interval} is above the maximum, {INTERVAL_S_MAX:g}s")
        self.interval_s = seconds or None
