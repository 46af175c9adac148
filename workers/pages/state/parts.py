"""Computes the parts of the state that are not in shared memory alone: processes, flow control's limits, and the configuration."""

from collections.abc import Mapping
from typing import Any

from epp.metrics.computed import PROCESS_CPU, PROCESS_EXITS, PROCESS_MEMORY
from epp.metrics.flow_control import FLOW_SATURATION
from workers.pages.flow import FlowFigures, figures_of
from workers.pages.processes import ProcessFigures
from workers.process.instance import Instance


class Parts:
    """The parts of one instance with one configuration."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._processes = ProcessFigures(instance.memory.lanes, instance.roll)
        self._flow: FlowFigures | None = figures_of(instance)

    def further(self) -> dict[str, Any]:
        """Returns the parts by name. Each is made of plain values."""
        options = self._instance.options
        return {
            "pool": options.pool_name,
            "processes": self._by_process(),
            "flow_control": self._flow_control(),
            "settings": self._settings(),
        }

    def _by_process(self) -> Mapping[str, Any]:
        """Returns memory, CPU time and unexpected ends of each process, by its name."""
        found: dict[str, dict[str, Any]] = {}
        for metric, _, rows in self._processes.families():
            for labels, value in rows:
                if metric is PROCESS_MEMORY:
                    found.setdefault(labels[0], {})["memory_bytes"] = int(value)
                elif metric is PROCESS_CPU:
                    found.setdefault(labels[0], {})["cpu_s"] = round(value)
                elif metric is PROCESS_EXITS and value:
                    found.setdefault(labels[0], {}).setdefault("exits", {})[labels[1]] = int(value)
        return found

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

    def _settings(self) -> Mapping[str, Any]:
        """Returns the effective configuration, its source, and the warnings about it."""
        config = self._instance.config
        return {
            "source": config.source,
            "effective": config.as_yaml(),
            "warnings": [str(warning) for warning in config.warnings],
        }
