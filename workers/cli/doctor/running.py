"""Asks a running picker for its state: `/debug/state` has the findings of the page's Health view."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import click
import msgspec

from epp.config.schema import API_VERSION
from epp.errors import UNREADABLE
from epp.quantities import parse_duration
from shm.observe import Seen
from shm.segment import SegmentError
from workers.cli import metrics_port
from workers.cli.which import Named
from workers.process.sockets import OF_POOL
from workers.shared.doctor_report import DOCTOR, ERROR, Finding
from workers.supervisor.pages.state.frames import VERSION
from workers.supervisor.pages.state.pool_findings import SHARED, settings_of

STATE: Final = "/debug/state"
DEFAULT: Final = "default"
STATE_S: Final = 10.0
START: Final = "start one: `epp serve --endpoints HOST:PORT`; to look elsewhere, give --run-dir, --instance or --url"

State = Mapping[str, Any]


class Running(NamedTuple):
    """A running picker. `seen`: None if the picker is on another machine. `state`: empty if the picker does not answer."""

    seen: Seen | None
    url: str
    state: State
    findings: list[Finding]

    def flag(self, name: str) -> str:
        """Returns the value of a flag of `epp serve` as text, or "" if unknown."""
        flags = self.state.get("settings", {}).get("flags", {})
        return str(flags.get(name, {}).get("value", ""))

    def given(self, name: str) -> bool:
        """Returns whether a flag was set."""
        flags = self.state.get("settings", {}).get("flags", {})
        return bool(flags.get(name, {}).get("origin", DEFAULT) != DEFAULT)


def running(picker: Named) -> Running:
    """Finds the picker and asks it for its state. If this fails, returns the failure as a finding."""
    seen: Seen | None = None
    if picker.url:
        asked = metrics_port.at(picker.url, picker.ca_file)
    else:
        try:
            seen = picker.find()
        except SegmentError as refused:
            return Running(None, "", {}, [Finding("no-picker", ERROR, "No picker runs here", str(refused), START)])
        asked = metrics_port.of(seen, picker.ca_file)
    url = asked.url
    try:
        state = msgspec.json.decode(asked.page(STATE, STATE_S))
        found = [msgspec.convert(each, Finding) for each in state["findings"]]
    except click.ClickException as failed:
        return Running(seen, url, {}, [_silent(failed.message)])
    except (*UNREADABLE, KeyError, TypeError) as strange:
        return Running(seen, url, {}, [_silent(f"{url}{STATE} is not the state of a picker: {strange}")])
    if state.get("version") != VERSION:
        why = f"the state has version {state.get('version')}, this command knows version {VERSION}"
        fix = "run the `epp doctor` of the picker's own version"
        found.append(Finding("version", ERROR, "The picker is of another version", why, fix))
    return Running(seen, url, state, [each for each in found if each.found_by != DOCTOR])


def effective(state: State, pool: str = "") -> Mapping[str, Any]:
    """Returns the effective configuration of a picker, or of one of its pools, as plain values; empty if unknown."""
    import yaml

    settings = settings_of(state, pool) if pool else state.get("settings", {})
    document = yaml.safe_load(settings.get("effective", "") or "{}")
    return document if isinstance(document, dict) and document.get("apiVersion") == API_VERSION else {}


def pools_of(state: State) -> list[str]:
    """Returns the names of several pools, or no names if the picker has one pool."""
    return list(state.get("pools", ()))


def ext_proc_ports(picker: Running) -> list[int]:
    """Returns the picker's ext_proc ports, including the ports of pools. Returns an empty list if they are not known."""
    ports = picker.seen.ports if picker.seen is not None else {}
    known = [port for name, port in ports.items() if name == "grpc" or name.startswith(OF_POOL)]
    opened = {pool["port"] for pool in picker.state.get("pools", {}).values() if "port" in pool}
    return [*known, *sorted(opened.difference(known))]


def vouches(state: State) -> bool:
    """Returns whether the picker knows the tenant of every request without a header from the client."""
    configurations = state.get("settings", {}).get("configurations", ())
    return state.get("tenants") is not None and all("tenants" in effective(state, each["pools"][0]) for each in configurations)


def only(running: Running, pool: str) -> Running:
    """Returns the picker with the endpoints and findings of one pool, and with the findings that are about no single pool."""
    state = running.state
    endpoints = {key: each for key, each in state.get("endpoints", {}).items() if each.get("pool") == pool}
    found = [each for each in running.findings if each.pool in (pool, msgspec.UNSET)]
    return running._replace(
        state={**state, "endpoints": endpoints, "pools": {pool: state["pools"][pool]}},
        findings=[each for each in found if each.pool == pool or not each.title.startswith(SHARED)],
    )


def waits_s(state: State) -> float:
    """Returns the longest time in seconds that a request may wait in the picker's queue, or 0 without flow control."""
    if not (pools := pools_of(state)):
        return _waits_s(effective(state)) if "flow_control" in state else 0.0
    first = [each["pools"][0] for each in state["settings"]["configurations"] if pools and set(pools) & set(each["pools"])]
    return max((_waits_s(effective(state, pool)) for pool in first), default=0.0)


def _waits_s(document: Mapping[str, Any]) -> float:
    flow = document.get("flowControl", {})
    bands = [flow, flow.get("defaultPriorityBand", {}), *flow.get("priorityBands", ())]
    return max((parse_duration(str(band.get("defaultRequestTTL", "0s"))) for band in bands), default=0.0)


def _silent(why: str) -> Finding:
    return Finding(
        "metrics-port",
        ERROR,
        "The picker's metrics port does not answer",
        why,
        "look at the picker's log; `epp top` reads shared memory and works without this port",
    )
