"""Asks the admin port of an Envoy: its configuration, and its counters about the picker."""

import json
from collections.abc import Mapping
from typing import Any, Final

from workers.cli import http_page
from workers.shared.doctor_report import ERROR, WARNING, Finding

PORTS: Final = (9901, 19000, 15000)  # the admin ports of deploy/envoy.yaml and the chart, of Envoy Gateway, and of Istio
DUMP: Final = "/config_dump?include_eds"
STATS: Final = "/stats?format=json&filter=%5Ecluster%5C.{}%5C.%7Cext_proc"
ADMIN_S: Final = 5.0
LOOK_S: Final = 0.5  # the time limit for a port that no flag names
DUMP_BYTES_MAX: Final = 256 << 20
FAILED_SHARE: Final = 0.01  # share of the connections or requests since Envoy's start


def dump(admin: str, timeout_s: float = ADMIN_S) -> Any:
    """Returns the configuration of the Envoy with this admin port: host:port or a URL. Raises OSError, ValueError."""
    return json.loads(_page(admin, DUMP, timeout_s))


def found() -> tuple[str, Any] | None:
    """Looks for an Envoy at the usual admin ports of this machine. Returns its address and its configuration."""
    for port in PORTS:
        admin = f"127.0.0.1:{port}"
        try:
            config = dump(admin, LOOK_S)
        except (OSError, ValueError):
            continue
        if isinstance(config, dict) and "configs" in config:
            return admin, config
    return None


def stats(admin: str, cluster: str) -> Mapping[str, int]:
    """Returns Envoy's counters about a cluster by the end of their names, and the sums of ext_proc's counters. Raises OSError,
    ValueError.
    """
    counters: dict[str, int] = {}
    answer = json.loads(_page(admin, STATS.format(cluster), ADMIN_S))
    listed = answer.get("stats") if isinstance(answer, dict) else None
    if not isinstance(listed, list):
        raise ValueError(f"{admin}: no counters of an Envoy at /stats")
    for each in listed:
        name, value = (str(each.get("name", "")), each.get("value")) if isinstance(each, dict) else ("", None)
        if isinstance(value, int):
            end = name.rpartition("ext_proc.")[2] if "ext_proc." in name else name.removeprefix(f"cluster.{cluster}.")
            counters[end] = counters.get(end, 0) + value
    return counters


def stats_findings(counters: Mapping[str, int]) -> list[Finding]:
    """Returns the findings from the counters about how Envoy reaches the picker."""
    findings = []
    connects, timeouts = counters.get("upstream_cx_total", 0), counters.get("upstream_cx_connect_timeout", 0)
    ejected, streams = counters.get("upstream_rq_pending_failure_eject", 0), counters.get("streams_started", 0)
    failed = counters.get("streams_failed", 0)
    if timeouts > FAILED_SHARE * connects or ejected > FAILED_SHARE * max(streams, ejected):
        findings.append(
            Finding(
                "gateway-cannot-connect",
                ERROR,
                "The gateway fails to connect to the picker, and answers requests with 503",
                f"since Envoy's start: {timeouts} of {connects} connections timed out (upstream_cx_connect_timeout), {ejected} requests "
                f"failed with them (upstream_rq_pending_failure_eject), {failed} of {streams} ext_proc streams failed",
                "give the picker more CPU (`epp size`), and its cluster connect_timeout: 10s (deploy/envoy.yaml)",
            )
        )
    elif failed > FAILED_SHARE * streams:
        findings.append(
            Finding(
                "gateway-streams-fail",
                WARNING,
                "Streams between the gateway and the picker fail",
                f"since Envoy's start: {failed} of {streams} ext_proc streams failed (ext_proc.streams_failed)",
                "look for `protocol` and `peers' faults` in the picker's log, and at the gateway's log",
            )
        )
    return findings


def _page(admin: str, path: str, timeout_s: float) -> str:
    url = admin if "://" in admin else f"http://{admin}"
    return http_page.get(url.rstrip("/") + path, timeout_s, bytes_max=DUMP_BYTES_MAX).content.decode()
