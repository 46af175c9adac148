"""Counts and logs failures in one worker: of requests, plugins, policies of flow control, shadow profiles, and peers."""

import time
from collections.abc import Callable

import structlog

from epp.errors import ProducerFailed
from epp.metrics.request_series import PEER_FAULTS
from epp.plugin import Plugin, Profile, foreign
from shm.areas import Area
from shm.series import SeriesWriter
from workers.host.log import Rarely, error_text, stack
from workers.worker.services import Warnings

FAULTS_LOGGED_PER_S = 5
BLOCKS = "all other requests of this worker waited meanwhile"
ADVICE = "let work that takes long go through `services`"
SLOW_BODY = "slow_body"

log = structlog.get_logger()


class Faults:
    """Counts all failures of one worker. Logs at most FAULTS_LOGGED_PER_S stack traces per second."""

    def __init__(self, area: Area) -> None:
        self._area = area
        self._warnings = Warnings(time.monotonic)
        # (plugin, text) that was logged; bounded, because the configuration bounds the plugins.
        self._remarked: set[tuple[str, str]] = set()
        self._logged = (0.0, 0)  # the beginning of the current second, and the number of traces logged in it

    def request_failed(self, problem: BaseException) -> None:
        """Logs an exception that the transport has caught."""
        self._log("request failed by a fault", problem)

    def plugin_failed(self, problem: BaseException, plugin: str) -> None:
        """Logs an exception from the work on a request or its answer. `plugin`: the name of the plugin at fault, or ""."""
        self._log("fault", problem, **({"plugin": plugin} if plugin else {}))

    def producer_failed(self, producer: Plugin, failure: ProducerFailed) -> None:
        """Counts and logs a data producer that failed. The request continues without its data."""
        self._area.add(self._area.schema.counter["producer_failures_total"])
        self._warnings.warn(producer, "data producer failed open", error=error_text(failure))

    def remark(self, plugin: Plugin, text: str) -> None:
        """Logs that a plugin works, but breaks its contract. Logs each text once per plugin."""
        if (plugin.name, text) not in self._remarked:
            self._remarked.add((plugin.name, text))
            log.warning("plugin breaks its contract", plugin=plugin.name, why=text)

    def blocked(self, plugin: Plugin, point: str, seconds: float) -> None:
        """Logs that a call of a plugin has kept the event loop busy. Logs this once per plugin. `seconds`: of CPU time."""
        if (plugin.name, BLOCKS) not in self._remarked:
            self._remarked.add((plugin.name, BLOCKS))
            why = f"{BLOCKS}: {ADVICE}" if foreign(type(plugin)) else BLOCKS
            log.warning("plugin blocks the worker", plugin=plugin.name, point=point, cpu_ms=round(seconds * 1e3), why=why)

    def policy_failed(self, plugin: str, problem: BaseException) -> None:
        """Counts and logs a policy of flow control that raised an exception. A built-in rule has decided in its place."""
        self._area.add(self._area.schema.counter["flow_policy_failures_total"])
        self._log("plugin of flow control failed", problem, plugin=plugin)

    def shadow_failed(self, profile: Profile, problem: BaseException) -> None:
        """Counts and logs a shadow profile that raised an exception."""
        self._area.add(self._area.schema.counter["shadow_failures_total"])
        self._log("shadow profile failed", problem, profile=profile.name)

    def _log(self, event: str, problem: BaseException, **more: str) -> None:
        second, count = self._logged
        now = time.monotonic()
        if now - second > 1:
            second, count = now, 0
        self._logged = (second, count + 1)
        if count < FAULTS_LOGGED_PER_S:
            log.error(event, error=error_text(problem), exception=stack(problem), **more)


class PeerFaults:
    """Counts the faults of peers of the ext_proc port by cause, and logs them. It is called with the cause of each fault.

    Details may follow the cause after a colon. Only the log shows them.
    """

    def __init__(self, series: SeriesWriter, report: Callable[..., None], now: Callable[[], float]) -> None:
        """`report`: a method of a logger, see `Rarely`. Each cause has a rate limit of its own, so a frequent cause hides no other."""
        self._series = series
        self._report = report
        self._now = now
        self._by_cause: dict[str, Rarely] = {}

    def __call__(self, cause: str) -> None:
        name = cause.partition(":")[0].replace(" ", "_")
        self._series.count(PEER_FAULTS.name, (name,))
        rarely = self._by_cause.get(name)
        if rarely is None:
            rarely = self._by_cause[name] = Rarely("peers' faults", self._report)
        rarely.tell(self._now(), cause)
