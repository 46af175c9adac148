"""Looks and figures that tests of the live view are made of."""

from typing import Any

from epp.metrics import REQUEST_PROCESSING
from shm.table import State
from workers.top.figures import EndpointLook, Figures, IndexLook, Instance, LaneLook, Look, figures

BOUNDS = (0.001, 0.002, 0.004)
INSTANCE = Instance(name="epp-9002", pid=7, ports={"metrics": 9090}, life="running", uptime_s=75.0)


def lane(**changes: Any) -> LaneLook:
    """One that serves."""
    given: dict[str, Any] = {
        "serving": True,
        "beat_age_s": 0.05,
        "starts": 1,
        "gauges": {"streams": 3, "connections": 2},
        "counters": {},
        "inflight": 0,
    }
    return LaneLook(**(given | changes))


def endpoint(name: str, **changes: Any) -> EndpointLook:
    """One that is fresh."""
    given: dict[str, Any] = {
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
    return EndpointLook(**(given | changes))


def look(**changes: Any) -> Look:
    """One supervisor, two workers, no endpoints, nothing counted."""
    given: dict[str, Any] = {
        "at": 100.0,
        "lanes": (lane(), lane(), lane()),
        "counters": {},
        "histograms": {REQUEST_PROCESSING.name: (0, 0, 0, 0)},
        "bounds": {REQUEST_PROCESSING.name: BOUNDS},
        "endpoints": (),
        "index": IndexLook(
            entries=1000, used=250, estimated=False, owners_live=3, owners_retired=1, evictions=5, dropped=6
        ),
    }
    return Look(**(given | changes))


def of(now: Look, before: Look | None = None) -> Figures:
    """Figures of the usual instance."""
    return figures(INSTANCE, now, before)
