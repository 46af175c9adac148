"""Looks and figures for the tests of the live view."""

from typing import Any

from epp.metrics.areas import REQUEST_PROCESSING
from shm.table import State
from workers.supervisor.pages.state.figures import Figures, Instance, figures
from workers.supervisor.pages.state.look import AreaLook, EndpointLook, IndexLook, Look

BOUNDS = (0.001, 0.002, 0.004)
INSTANCE = Instance(name="epp-9002", pid=7, ports={"metrics": 9090}, life="running", uptime_s=75.0)


def area(**changes: Any) -> AreaLook:
    """The area of a serving process."""
    values: dict[str, Any] = {
        "serving": True,
        "heartbeat_age_s": 0.05,
        "starts": 1,
        "gauges": {"streams": 3, "connections": 2},
        "counters": {},
        "inflight": 0,
    }
    return AreaLook(**(values | changes))


def endpoint(name: str, **changes: Any) -> EndpointLook:
    """A fresh endpoint."""
    values: dict[str, Any] = {
        "name": name,
        "namespace": "default",
        "address": "10.0.0.1:8000",
        "state": State.FRESH,
        "flags": 0,
        "age_s": 0.04,
        "scraped": {"waiting_requests": 2.0, "running_requests": 5.0, "kv_cache_usage": 0.25},
        "inflight_requests": 0,
        "inflight_tokens": 0,
        "index_entries": 0,
        "picks": 0,
    }
    return EndpointLook(**(values | changes))


def look(**changes: Any) -> Look:
    """A supervisor, two workers, no endpoints, and all counters at zero."""
    values: dict[str, Any] = {
        "at": 100.0,
        "areas": (area(), area(), area()),
        "counters": {},
        "histograms": {REQUEST_PROCESSING.name: (0, 0, 0, 0)},
        "bounds": {REQUEST_PROCESSING.name: BOUNDS},
        "endpoints": (),
        "index": IndexLook(
            entries=1000, used=250, used_share=0.25, estimated=False, owners_live=3, owners_retired=1, evictions=5, dropped=6
        ),
    }
    return Look(**(values | changes))


def of(now: Look, before: Look | None = None) -> Figures:
    """The figures of INSTANCE for these looks."""
    return figures(INSTANCE, now, before)
