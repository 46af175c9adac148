"""Creates events on the InferencePool, so that `kubectl describe inferencepool` shows the outcome of a change of the configuration.

Each event is one POST. An event that cannot be stored is dropped, because the log and the metrics say the same. A picker without the
permission logs this once, and creates no further events.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final

import msgspec

from workers.shared.reload_status import ReloadStatus
from workers.supervisor.kube.api import Api, Resource
from workers.supervisor.kube.errors import ApiError, Unreachable
from workers.supervisor.kube.object_kinds import PoolName
from workers.supervisor.kube.pool import VERSION

COMPONENT: Final = "endpoint-picker"
MESSAGE_CHARS_MAX: Final = 1000  # the API server takes 1,024 bytes
WAITING_MAX: Final = 8
SENT_S: Final = 10.0
RELOADED: Final = "ConfigurationReloaded"
REFUSED: Final = "ConfigurationRefused"
ROLLED_BACK: Final = "ConfigurationRolledBack"
TAKEN_BACK: Final = "error[rolled-back]"


class PoolEvents:
    """The events of one picker. `tell` queues an event, and `run` sends the queued events."""

    def __init__(
        self,
        namespace: str,
        pool: PoolName,
        *,
        reporter: str,
        uid: Callable[[], str],
        report: Callable[..., None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`reporter`: the name of this replica. `uid` returns the UID of the pool, or "" while it is not known."""
        self._namespace = namespace
        self._pool = pool
        self._reporter = reporter
        self._uid = uid
        self._report = report
        self._wall = wall
        self._waiting: deque[bytes] = deque(maxlen=WAITING_MAX)  # if more come, the oldest is dropped
        self._some = asyncio.Event()

    def tell(self, reason: str, message: str, *, warning: bool) -> None:
        """Queues an event about the pool. `reason`: one word in CamelCase."""
        at = datetime.fromtimestamp(self._wall(), UTC)
        moment = at.strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{self._pool.name}.{int(at.timestamp() * 1e6):x}", "namespace": self._namespace},
            "involvedObject": {
                "apiVersion": f"{self._pool.group}/{VERSION}",
                "kind": "InferencePool",
                "namespace": self._namespace,
                "name": self._pool.name,
                "uid": self._uid(),
            },
            "reason": reason,
            "message": message if len(message) <= MESSAGE_CHARS_MAX else f"{message[: MESSAGE_CHARS_MAX - 1]}…",
            "type": "Warning" if warning else "Normal",
            "source": {"component": COMPONENT, "host": self._reporter},
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "count": 1,
            "reportingComponent": COMPONENT,
            "reportingInstance": self._reporter,
        }
        self._waiting.append(msgspec.json.encode(event))
        self._some.set()

    async def run(self, server: Api) -> None:
        """Sends events until it is cancelled, or until the API server refuses events of this picker."""
        path = Resource("", "v1", "events", self._namespace).path
        while True:
            await self._some.wait()
            self._some.clear()
            while self._waiting:
                try:
                    await server.request("POST", path, body=self._waiting.popleft(), timeout_s=SENT_S)
                except ApiError as refused:
                    self._report("event on the pool is not stored", reason=str(refused))
                    if refused.status == HTTPStatus.FORBIDDEN:
                        return
                except Unreachable as away:
                    self._report("event on the pool is not stored", reason=str(away))


class ReloadEvents:
    """Tells how each change of the configuration ended, once, as an event on the pool.

    The state at its creation causes no event: a predecessor has reported it already, or there was no reload yet.
    """

    def __init__(self, read: Callable[[], ReloadStatus | None], events: PoolEvents) -> None:
        self._read = read
        self._events = events
        status = read()
        self._finished = status.finished if status is not None else 0

    def look(self) -> None:
        """Tells how the last attempt ended, if it has ended since the last call."""
        status = self._read()
        if status is None or status.busy or status.finished == self._finished:
            return
        self._finished = status.finished
        generation = f"generation {status.generation} ({status.hash})"
        if status.successful:
            tried = status.tryout
            beside = f"; candidate {tried.generation} ({tried.hash}) is tried {tried.share}" if tried is not None else ""
            self._events.tell(RELOADED, f"{generation} is in force{beside}", warning=False)
            return
        reason = ROLLED_BACK if TAKEN_BACK in status.text else REFUSED
        self._events.tell(reason, f"{generation} is in force: {status.text}", warning=True)
