"""Computes the parts of the state that are not in shared memory alone: processes, host, limits of flow control, and configuration."""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from epp.metrics.computed import CERTIFICATE_EXPIRY, PROCESS_CPU, PROCESS_EXITS, PROCESS_MEMORY
from epp.metrics.flow_control import FLOW_SATURATION
from shm.observe import SECRET
from workers.host import cpus
from workers.host.options import OTHER_FLAGS, SECRET_OPTIONS
from workers.process.instance import Instance
from workers.shared import doctor_report
from workers.supervisor.pages.flow import FlowFigures, figures_of
from workers.supervisor.pages.processes import ProcessFigures
from workers.supervisor.pages.state.frames import Further
from workers.supervisor.pages.state.recent import Recent
from workers.supervisor.pages.tenants import TenantUse

SHARED_MEMORY: Final = "/dev/shm"
VALUE_CHARS_MAX: Final = 200
TENANTS_SHOWN: Final = 50


class Parts:
    """The parts of one instance with one configuration."""

    def __init__(
        self,
        instance: Instance,
        recent: Recent,
        troubles: Callable[[], Mapping[str, str]],
        access: Callable[[], Mapping[str, str]],
        store: Callable[[], bool | None],
        tenants: TenantUse,
    ) -> None:
        """`recent`: the counters of the last minutes. `troubles`, `access`, `store`: as in `workers.supervisor.live.Live`."""
        self._instance = instance
        self._recent = recent
        self._troubles = troubles
        self._access = access
        self._store = store
        self._tenants = tenants
        metrics = instance.credentials.metrics
        until = None if metrics is None else lambda: metrics.valid_until
        self._processes = ProcessFigures(instance.memory.lanes, instance.roll, metrics_certificate=until)
        self._flow: FlowFigures | None = figures_of(instance) if not instance.pools else None

    def further(self, counters: Mapping[str, int]) -> Further:
        """Returns the parts by name, made of plain values, and why scrapes fail. `counters`: the present ones."""
        options = self._instance.options
        processes, certificates = self._by_process()
        values = {
            "pool": options.pool_name,
            "processes": processes,
            "certificates": certificates,
            "recent": self._recent.increases(counters),
            "host": self._host,
            "shared_memory": _shared_memory(),
            "access_refused": self._access(),
            "replica_store_connected": self._store(),
            "doctor": doctor_report.read(options.run_dir, options.instance, self._instance.lock.info[SECRET]),
            "flow_control": self._flow_control(),
            "tenants": self._tenants.tenants(TENANTS_SHOWN) if self._instance.config.tenants is not None else None,
            "settings": self._settings,
        }
        return Further(values, self._troubles())

    def _by_process(self) -> tuple[Mapping[str, Any], Mapping[str, int]]:
        """Returns memory, CPU time and unexpected ends of each process, by its name; and when certificates end, by port."""
        found: dict[str, dict[str, Any]] = {}
        certificates: dict[str, int] = {}
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
        return found, certificates

    def _flow_control(self) -> Mapping[str, Any] | None:
        """Returns the limits and the saturation by stage; None if flow control is off."""
        plan = self._instance.config.flow
        if plan is None or self._flow is None:
            return None
        saturation = next(shown for shown in self._flow.families() if shown.metric is FLOW_SATURATION)
        bands = {str(band.priority): {"requests": band.max_requests, "bytes": band.max_bytes} for band in plan.bands}
        return {
            "detector": plan.detector.name,
            "saturation": {stage: value for (_, stage), value in saturation.rows},
            "requests_max": plan.max_requests,
            "bytes_max": plan.max_bytes,
            "bands_max": bands,
            "band_default": {"requests": plan.template.max_requests, "bytes": plan.template.max_bytes},
        }

    @functools.cached_property
    def _host(self) -> Mapping[str, int]:
        """The CPUs that the picker may use, and the workers that it starts with."""
        return {"cpus": cpus.available(), "workers": self._instance.options.workers}

    @functools.cached_property
    def _settings(self) -> Mapping[str, Any]:
        """The effective configuration with the origin of each line, its source, the warnings about it, and the flags."""
        config, options = self._instance.config, self._instance.options
        effective, origins = config.with_origins()
        flags = {}
        for option in options.__struct_fields__:
            name, value = OTHER_FLAGS.get(option, option), shown_option(option, getattr(options, option))
            flags[name.replace("_", "-")] = {"value": value, "origin": options.given.get(name, "default")}
        del flags["given"], flags["pool-given"]  # not flags, but what is known about them
        return {
            "source": config.source,
            "effective": effective,
            "origins": origins,
            "warnings": [str(warning) for warning in config.warnings],
            "flags": flags,
        }


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
