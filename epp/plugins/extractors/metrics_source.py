"""Defines the data sources: where the page of each endpoint is, and how it is scraped.

Only one source decides which endpoints are fresh or down: the first source whose type has `shows_health`. All sources fill columns of the
endpoint table.
"""

import re
from typing import Annotated, ClassVar, Final, Literal

import msgspec

from epp.plugin import DataSource, plugin
from epp.plugins.extractors._pages import METRICS, MODELS
from epp.quantities import named_duration

# The longest interval. Older values say nothing about a server's load, and each tick of an interval has a bucket in memory.
INTERVAL_S_MAX = 600.0
_CERTIFICATES: Final = dict.fromkeys(("insecureSkipVerify", "caCertPath", "clientCertPath", "clientKeyPath"), ("scheme", ("https",)))
_PATH = re.compile(r"/[!-~]*")


def parse_interval(text: str) -> float:
    """Returns a duration such as `50ms` or `1m30s` in seconds. Raises ValueError if it is invalid or negative."""
    seconds = named_duration("interval", text)
    if seconds < 0:
        raise ValueError(f"interval: '{text}' is negative; write for example 50ms, or omit it to use --refresh-metrics-interval")
    return seconds


@plugin("metrics-data-source")
class MetricsDataSource(DataSource):
    """Scrapes the metrics page of each endpoint at `scheme://endpoint:port/path`.

    If `interval_s` is None, the flag --refresh-metrics-interval sets the interval. `at_node`: whether the page is at the address of the
    endpoint's node. `pages`: the kind of the source's pages. `shows_health`: whether the source's scrapes may decide which endpoints are
    fresh or down. `replaces_default`: whether the default source is left out beside this one, unless a plugin reads values of the default
    source. `budget`: the share of a server's time that its pages may take; None if not set.
    """

    counts_with: ClassVar = _CERTIFICATES
    pages: ClassVar[str] = METRICS
    shows_health: ClassVar[bool] = True
    replaces_default: ClassVar[bool] = False
    at_node = False

    class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
        """How the metrics of a server are read.

        scheme: http or https.
        path: The path of the page.
        port: The port of the page. Default: the port of the endpoint.
        insecure_skip_verify: Accept any certificate.
        ca_cert_path: A PEM file with the CAs of the servers.
        client_cert_path: A PEM file with the client's certificate.
        client_key_path: A PEM file with the client's key.
        interval: The time between two scrapes. Default: --refresh-metrics-interval.
        metrics_budget: The share of a server's time that its pages may take. A page costs the time from its request to its last byte at low
            load. At least one page is read in 2 s, at most one per interval. Default: 0.01. But if an interval is set, or a plugin reads
            values that only pages have, the picker reads a page in each interval.
        """

        scheme: Literal["http", "https"] = "http"
        path: str = "/metrics"
        port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
        insecure_skip_verify: bool = True
        ca_cert_path: str = ""
        client_cert_path: str = ""
        client_key_path: str = ""
        interval: str | None = None
        metrics_budget: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None

    def __init__(self, name: str, params: "MetricsDataSource.Params") -> None:
        super().__init__(name, params)
        self.scheme = params.scheme
        self.path = params.path if params.path.startswith("/") else f"/{params.path}"
        if not _PATH.fullmatch(self.path):
            raise ValueError(f"path: {params.path!r} has blanks or control characters; escape them")
        if bool(params.client_cert_path) != bool(params.client_key_path):
            present = "clientCertPath" if params.client_cert_path else "clientKeyPath"
            raise ValueError(f"{present}: clientCertPath and clientKeyPath go together; set both")
        self.port = params.port
        self.insecure_skip_verify = params.insecure_skip_verify
        self.ca_cert_path = params.ca_cert_path
        self.client_cert_path = params.client_cert_path
        self.client_key_path = params.client_key_path
        seconds = parse_interval(params.interval) if params.interval is not None else 0.0
        if seconds > INTERVAL_S_MAX:
            raise ValueError(f"interval: {params.interval} is above the maximum, {INTERVAL_S_MAX:g}s")
        self.interval_s = seconds or None
        self.budget = params.metrics_budget

    @property
    def files(self) -> list[str]:
        """Returns the paths of the files that the parameters name."""
        return [path for path in (self.ca_cert_path, self.client_cert_path, self.client_key_path) if path]


@plugin("dcgm-data-source")
class DcgmDataSource(MetricsDataSource):
    """Scrapes the DCGM exporter of each endpoint: a sidecar, or with `useNodeAddress` the DaemonSet of the endpoint's node."""

    counts_with: ClassVar = {"insecureSkipVerify": _CERTIFICATES["insecureSkipVerify"]}
    shows_health = False

    class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
        """How the exporter of a server is read.

        scheme: http or https.
        path: The path of the page.
        port: The port of the exporter.
        insecure_skip_verify: Accept any certificate.
        use_node_address: Read the exporter of the endpoint's node instead of a sidecar.
        interval: The time between two scrapes. Default: --refresh-metrics-interval.
        """

        scheme: Literal["http", "https"] = "http"
        path: str = "/metrics"
        port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 9400
        insecure_skip_verify: bool = True
        use_node_address: bool = False
        interval: str | None = None

    def __init__(self, name: str, params: "DcgmDataSource.Params") -> None:
        given = msgspec.structs.asdict(params)
        self.at_node = given.pop("use_node_address")
        super().__init__(name, MetricsDataSource.Params(**given))
        self.params = params


@plugin("models-data-source")
class ModelsDataSource(MetricsDataSource):
    """Asks each endpoint at /v1/models for the models that it serves."""

    pages = MODELS
    shows_health = False

    class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
        """How the models of a server are asked for.

        scheme: http or https.
        path: The path of the list.
        insecure_skip_verify: Accept any certificate.
        ca_cert_path: A PEM file with the CAs of the servers.
        client_cert_path: A PEM file with the client's certificate.
        client_key_path: A PEM file with the client's key.
        interval: The time between two requests. Default: --refresh-metrics-interval.
        """

        scheme: Literal["http", "https"] = "http"
        path: str = "/v1/models"
        insecure_skip_verify: bool = True
        ca_cert_path: str = ""
        client_cert_path: str = ""
        client_key_path: str = ""
        interval: str | None = None

    def __init__(self, name: str, params: "ModelsDataSource.Params") -> None:
        super().__init__(name, MetricsDataSource.Params(**msgspec.structs.asdict(params)))
        self.params = params


@plugin("multicluster-metrics-data-source")
class MulticlusterMetricsDataSource(MetricsDataSource):
    """Scrapes the picker of each cluster for the averages of its pool. Uses https with a checked certificate by default."""

    replaces_default = True

    class Params(MetricsDataSource.Params, frozen=True, forbid_unknown_fields=True, rename="camel"):
        """How the page of a cluster's picker is read.

        scheme: http or https.
        path: The path of the page.
        port: The port of the page. Default: the endpoint's label `metricsPort`, or else the port of the endpoint.
        insecure_skip_verify: Accept any certificate.
        ca_cert_path: A PEM file with the CAs of the servers.
        client_cert_path: A PEM file with the client's certificate.
        client_key_path: A PEM file with the client's key.
        interval: The time between two scrapes. Default: --refresh-metrics-interval.
        metrics_budget: The share of a picker's time that reading its page may take. It decides how often the page is read.
        """

        scheme: Literal["http", "https"] = "https"
        insecure_skip_verify: bool = False
