"""Computes the parts of the state that are not in shared memory alone: processes, host, limits of flow control, and configuration."""

import functools
import os
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

from epp.config.effective import EffectiveConfig
from epp.metrics.computed import CERTIFICATE_EXPIRY, CERTIFICATE_SOON, PROCESS_CPU, PROCESS_EXITS, PROCESS_MEMORY
from epp.metrics.flow_control import FLOW_SATURATION
from shm.flow_areas import WAITING
from shm.observe import SECRET
from workers.host import cgroup
from workers.host.options import OTHER_FLAGS, SECRET_OPTIONS
from workers.process.instance import Instance
from workers.process.pool_views import present
from workers.shared import doctor_report
from workers.shared.pool_crashes import OutOfService, named
from workers.supervisor.pages.flow import FlowFigures, figures_of
from workers.supervisor.pages.processes import ProcessFigures
from workers.supervisor.pages.state.frames import Further
from workers.supervisor.pages.state.history import Recent
from workers.supervisor.pages.tenant_use import TenantUse

SHARED_MEMORY: Final = "/dev/shm"
VALUE_CHARS_MAX: Final = 200
TENANTS_SHOWN: Final = 50
UNSERVED_SHOWN: Final = 100  # InferencePools that are not served
FLOWS_SHOWN: Final = 32  # pools with flow control whose saturation is computed
CONFIGURATIONS_CHARS_MAX: Final = 1 << 18


class Told(NamedTuple):
    """The data from the other parts of the supervisor. `troubles`: id of an endpoint -> why its last scrape failed.

    `access_refused`: resource of Kubernetes -> why it cannot be followed. `unserved`: InferencePool -> why it is not served.
    `store_connected`: whether the replica store can be used; None without a store.
    """

    troubles: Mapping[str, str]
    access_refused: Mapping[str, str]
    unserved: Mapping[str, str]
    store_connected: bool | None


class StateParts:
    """The parts of one instance with one configuration."""

    def __init__(self, instance: Instance, recent: Recent, told: Callable[[], Told], tenants: TenantUse) -> None:
        """`recent`: the counters of the last minutes."""
        self._instance = instance
        self._recent = recent
        self._told = told
        self._tenants = tenants
        self._processes = ProcessFigures(instance)
        self._pools = [pool for pool in instance.pools if pool.options.pool_name] if instance.pool_names else []  # without empty places
        self._flows: dict[str, FlowFigures] = {}  # by the name of the pool

    def further(self, counters: Mapping[str, int]) -> Further:
        """Returns the parts by name, made of plain values, and why scrapes fail. `counters`: the present counters."""
        options, told = self._instance.options, self._told()
        processes, certificates, soon = self._by_process()
        values = {
            "pool": options.pool_name,
            "processes": processes,
            "certificates": certificates,
            "certificates_soon": soon or None,
            "recent": self._recent.increases(counters),
            "host": self._host,
            "shared_memory": _shared_memory(),
            "access_refused": told.access_refused,
            "pools_unserved": dict(islice(sorted(told.unserved.items()), UNSERVED_SHOWN)) or None,
            "replica_store_connected": told.store_connected,
            "doctor": doctor_report.read(options.run_dir, options.instance, self._instance.lock.info[SECRET]),
            "flow_control": None if self._instance.pools else self._flow_control(self._instance),
            "pools": self._of_pools(),
            "tenants": self._tenants.tenants(TENANTS_SHOWN)
            if any(pool.config.tenants is not None for pool in self._instance.every)
            else None,
            "settings": self._settings,
        }
        return Further(values, told.troubles)

    def _by_process(self) -> tuple[Mapping[str, Any], Mapping[str, int], list[str]]:
        """Returns memory, CPU time and unexpected ends of each process, by its name; when certificates end, by port; and the ports with
        certificates that expire soon.
        """
        found: dict[str, dict[str, Any]] = {}
        certificates: dict[str, int] = {}
        soon: list[str] = []
        for metric, _, rows in self._processes.families():
            for labels, value in rows:
                if metric is PROCESS_MEMORY:
                    found.setdefault(labels[0], {})["memory_bytes"] = int(value)
                elif metric is PROCESS_CPU:
                    found.setdefault(labels[0], {})["cpu_s"] = round(value)
                elif metric is PROCESS_EXITS and value:
                    found.setdefault(labels[0], {}).setdefault("exits", {})[labels[1]] = int(value)
                elif metric is CERTIFICATE_EXPIRY:
                    certificates[labels[0]] = int(value)
                elif metric is CERTIFICATE_SOON and value:
                    soon.append(labels[0])
        return found, certificates, soon

    def _full_first(self) -> list[Instance]:
        """Returns up to FLOWS_SHOWN of several pools with flow control, pools with waiting requests first."""
        flows = [pool for pool in self._pools if pool.config.flow is not None]
        return sorted(flows, key=lambda pool: -pool.memory.flow.total(WAITING))[:FLOWS_SHOWN]

    def _of_pools(self) -> Mapping[str, Any]:
        """Returns facts about several pools, by name: the pool's own port, the limits of flow control, and why the pool is out of
        service.
        """
        choice, pools = self._instance.choice, self._instance.pools
        ports = choice.ports if choice is not None and self._pools else {}
        found: dict[str, dict[str, Any]] = {pools[number].options.pool_name: {"port": port} for port, number in ports.items()}
        for pool in self._full_first():
            found.setdefault(pool.options.pool_name, {})["flow_control"] = self._flow_control(pool)
        out = OutOfService(self._instance.words.out_of_service)
        for number, pool in enumerate(present(self._instance).pools if out.changes else ()):
            if (why := out.of(number, pool.options.pool_name, pool.number_in_force)) is not None:
                plugin = named(why.mark, pool.config.pipeline.plugins)
                found.setdefault(pool.options.pool_name, {})["out_of_service"] = plugin
        return found

    def _flow_control(self, pool: Instance) -> Mapping[str, Any] | None:
        """Returns the limits and the saturation by stage, or None if flow control is off."""
        plan, name = pool.config.flow, pool.options.pool_name
        if name not in self._flows and (made := figures_of(pool)) is not None:
            self._flows[name] = made
        if plan is None or (figures := self._flows.get(name)) is None:
            return None
        saturation = next(rows for metric, _, rows in figures.families() if metric is FLOW_SATURATION)
        bands = {str(band.priority): {"requests": band.max_requests, "bytes": band.max_bytes} for band in plan.bands}
        return {
            "detector": plan.detector.name,
            "saturation": {stage: value for (_, stage), value in saturation},
            "requests_max": plan.max_requests,
            "bytes_max": plan.max_bytes,
            "bands_max": bands,
            "band_default": {"requests": plan.template.max_requests, "bytes": plan.template.max_bytes},
        }

    @functools.cached_property
    def _host(self) -> Mapping[str, int]:
        """The CPUs that the picker may use, and the workers that it starts with."""
        return {"cpus": cgroup.available(), "workers": self._instance.options.workers}

    @functools.cached_property
    def _settings(self) -> Mapping[str, Any]:
        """The effective configuration with the origin of each line, its source, the warnings about it, and the flags."""
        config, options = self._instance.config, self._instance.options
        flags = {}
        for option in options.__struct_fields__:
            name, value = OTHER_FLAGS.get(option, option), shown_option(option, getattr(options, option))
            flags[name.replace("_", "-")] = {"value": value, "origin": options.given.get(name, "default")}
        del flags["given"], flags["pool-given"]  # not flags, but facts about flags
        if not self._instance.pool_names:
            return {**_shown(config), "flags": flags}
        return {"source": options.pools_file or options.config_dir, "configurations": self._configurations(), "flags": flags}

    def _configurations(self) -> list[Mapping[str, Any]]:
        """Returns the different configurations of several pools, each with the names of its pools, up to CONFIGURATIONS_CHARS_MAX."""
        names: dict[int, list[str]] = {}
        configs = {id(pool.config): pool.config for pool in self._pools}
        for pool in self._pools:
            names.setdefault(id(pool.config), []).append(pool.options.pool_name)
        found: list[Mapping[str, Any]] = []
        room = CONFIGURATIONS_CHARS_MAX
        for key, config in configs.items():
            shown = _shown(config)
            room -= len(shown["effective"])
            if room < 0:
                break
            found.append({"pools": names[key], **shown})
        return found


def _shown(config: EffectiveConfig) -> Mapping[str, Any]:
    effective, origins = config.with_origins()
    warnings = [str(warning) for warning in config.warnings]
    return {"source": config.source, "effective": effective, "origins": origins, "warnings": warnings}


def shown_option(name: str, value: Any) -> str:
    """Returns the value of an option as text. A value that may have a password is not shown."""
    if name in SECRET_OPTIONS:
        return "(set)" if value else ""
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return ("" if value is None else str(value).lower() if isinstance(value, bool) else str(value))[:VALUE_CHARS_MAX]


def _shared_memory() -> Mapping[str, int]:
    """Returns the size of the file system of shared memory, and how much of it is free, in bytes."""
    found = os.statvfs(SHARED_MEMORY)
    return {"bytes": found.f_blocks * found.f_frsize, "free_bytes": found.f_bavail * found.f_frsize}
