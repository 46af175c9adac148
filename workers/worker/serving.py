"""Starts a worker's transport with its limits, and publishes the worker's load for the other workers."""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from shm.areas import Area
from shm.series import SeriesWriter
from workers.host.memory import Leaving, cgroup_limit, share
from workers.process.instance import Instance
from workers.process.sockets import listens
from workers.transport import native
from workers.transport.accept import Accepting
from workers.transport.interface import Application, Clock, Handler, Server
from workers.transport.limits import BUDGET_MAX, Budget, Limits
from workers.worker.body_timeout import BodyRelief
from workers.worker.extproc.stream import ExtProcStream
from workers.worker.faults import PeerFaults

# The part of a worker's memory for messages that peers do not finish and answers that they do not read.
PEERS_SHARE = 0.25
GIVEN_UP = "handshake given up"  # the beginning of the cause of a fault that `native` reports

log = structlog.get_logger()


class Serving:
    """Runs the server of one worker. `leaving` returns the `Leaving` states of the other serving workers, by ordinal.

    `pool_at` returns the name of the pool that has its own port, or "" if the port has several pools.
    """

    def __init__(
        self,
        instance: Instance,
        area: Area,
        abuse: SeriesWriter,
        *,
        clock: Clock,
        on_error: Callable[[BaseException], None],
        leaving: Callable[[], dict[int, int]],
        pool_at: Callable[[int], str],
    ) -> None:
        self._instance = instance
        self._area = area
        self._clock = clock
        self._on_error = on_error
        self._leaving = leaving
        self._pool_at = pool_at
        self.peer_faults = PeerFaults(abuse, log.warning, time.monotonic)
        self._budget = self._create_budget()
        self._later = instance.sockets.later
        self.server: Server
        self._native: native.Server | None = None

    def start(self, loop: asyncio.AbstractEventLoop, application: Application) -> None:
        """Serves with the configured transport."""
        instance = self._instance
        limits = Limits(message=instance.options.message_bytes_max)
        if instance.options.transport == "grpcio":
            # This takes 20 MiB, and grpc is not fork-safe: import it only after the fork.
            from workers.transport import grpcio

            grpcio_server = grpcio.Server(
                loop, limits, self._budget, on_abuse=self._fault, on_error=self._on_error, clock=self._clock, now=time.monotonic
            )
            grpcio_server.serve(instance.sockets.ext_proc, application, instance.credentials.ext_proc)
            self.server = grpcio_server
            return
        native_server = native.Server(
            loop,
            limits,
            self._budget,
            on_abuse=self._fault,
            on_error=self._on_error,
            accepting=Accepting(
                accepted=self._accepted,
                # At once, because the next connection must see the true load.
                left=self.publish_load,
                failed=self._not_accepted,
                others=self._other_workers,
                anywhere=lambda: instance.memory.areas.counters()["connections_total"],
            ),
            clock=self._clock,
            now=time.monotonic,
        )
        native_server.serve(instance.sockets.ext_proc, application, instance.credentials.ext_proc_context, instance.sockets.pools)
        self.server = self._native = native_server
        self.look()

    def look(self) -> None:
        """Serves the ports that the supervisor has opened since the last call."""
        if self._native is not None and (opened := [each for each in self._later if listens(each)]):
            self._later = [each for each in self._later if each not in opened]
            self._native.serve_also(opened)

    def streams(self, among: Sequence[Handler] | None = None) -> list[ExtProcStream]:
        """Returns all open ext_proc streams, or the streams of the handlers `among`."""
        # If stream metrics are enabled, each ext_proc handler is wrapped in another handler.
        handlers = self.server.handlers() if among is None else among
        innermost = [getattr(handler, "handler", handler) for handler in handlers]
        return [stream for stream in innermost if isinstance(stream, ExtProcStream)]

    def refuse_waiting(self) -> int:
        """Refuses every request that has no decision yet. Returns their number."""
        return sum(stream.refuse_waiting() for stream in self.streams())

    def publish_load(self) -> None:
        """Publishes in the area how many streams and connections this worker has, for the other workers."""
        scalars, scalar = self._area.scalars, self._area.schema.scalar
        scalars[scalar["streams"]] = self.server.streams
        scalars[scalar["connections"]] = self.server.connections
        scalars[scalar["accept_load"]] = self.server.load()

    def _fault(self, cause: str) -> None:
        if cause.startswith(GIVEN_UP):
            self._area.add(self._area.schema.counter["handshakes_given_up_total"])
        self.peer_faults(cause)

    def _accepted(self) -> None:
        self._area.add(self._area.schema.counter["connections_total"])
        self.publish_load()  # at once, because the next connection may arrive together with this one

    def _not_accepted(self, event: str, *, port: int, **fields: object) -> None:
        log.error(event, port=port, **({"pool": name} if (name := self._pool_at(port)) else {}), **fields)

    def _create_budget(self) -> Budget:
        """Creates the budget of bytes that this worker holds for its peers: PEERS_SHARE of the worker's memory, if this memory is limited.

        The budget always suffices for the largest body of one peer in addition to what the other peers hold.
        """
        options = self._instance.options
        memory = share(options.worker_memory_limit, cgroup_limit(), options.workers)
        budget = Budget()
        if memory:
            budget.limit = max(2 * options.message_bytes_max, min(BUDGET_MAX, int(PEERS_SHARE * memory)))
        budget.relieve = BodyRelief(budget.limit, self.streams, time.monotonic, self.peer_faults)
        return budget

    def _other_workers(self) -> list[tuple[bool, int, float]]:
        """Returns for `Gate`, per other worker: whether it accepts connections, its load, and the age of its last heartbeat in seconds."""
        areas = self._instance.memory.areas
        ages = areas.ages(time.monotonic())
        loads = areas.scalars("accept_load")
        return [(state != Leaving.LEAVES, loads[i], ages[i]) for i, state in self._leaving().items()]
