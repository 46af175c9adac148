"""Proves a configuration in a trial child: starts its plugins and decides requests, as a worker would, in a private copy of the memory.

The parent forks the child, and kills it after `workers.process.reload.TRIAL_S`. So a plugin that hangs, exits or crashes ends only the
trial. The copy has the endpoints, metrics and prefix index of the moment of the fork.

If a producer fails open, the trial accepts the configuration, because the producer's server may be away. The trial refuses the
configuration if a plugin raises any other exception, forks, or takes more and more memory.
"""

import asyncio
import contextlib
import os
import time
from typing import Final

import uvloop

from epp.decision.decide import choose
from epp.decision.decision import Decision, Response, Usage
from epp.errors import PluginFault, ProducerFailed, Refused
from epp.plugin import Plugin, Profile
from epp.points.isolation import culprit
from epp.protocol import codec
from epp.request import Request
from shm.areas import Area
from workers.host.log import error_text
from workers.host.memory import MemoryUsage
from workers.process.instance import Instance
from workers.process.resources import packet_pipe
from workers.shared.bus import BusWriter
from workers.transport.interface import Clock
from workers.worker.extproc.pipelines import Lease
from workers.worker.faults import Faults
from workers.worker.setup import WorkerParts

REQUESTS: Final = 128
WARM: Final = 16  # the first WARM requests fill caches, so memory is measured after them
LEAK_BYTES: Final = 32 << 20  # if memory grows by more than this after the first requests, a plugin leaks
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
BODY: Final = b'{"model": "trial", "prompt": "%s", "messages": [{"role": "user", "content": "%s"}], "max_tokens": 8}'
PROMPT: Final = b"A request that only tries a configuration. " * 20


class Unproven(Exception):
    """Raised if the trial refuses the configuration. The text names the plugin and its fault."""


class Witness(Faults):
    """Remembers the first failure of a plugin, instead of counting and logging it."""

    def __init__(self, area: Area) -> None:
        super().__init__(area)
        self.first: tuple[str, BaseException] | None = None

    def plugin_failed(self, problem: BaseException, plugin: str) -> None:
        self.first = self.first or (plugin, problem)

    def policy_failed(self, plugin: str, problem: BaseException) -> None:
        self.plugin_failed(problem, plugin)

    def shadow_failed(self, profile: Profile, problem: BaseException) -> None:
        plugin = culprit(problem)
        self.plugin_failed(problem, plugin.name if plugin is not None else f"of profile {profile.name}")

    def producer_failed(self, producer: Plugin, failure: ProducerFailed) -> None:
        """Does nothing, because the producer's server may be away."""


def prove(instance: Instance) -> None:
    """Starts the configuration of `instance` and decides requests with it. Raises Unproven. `instance` must have a private copy of the
    memory.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_prove(instance))
    if children := _children():
        raise Unproven(f"error[trial]: a plugin started a process ({children}); workers must not fork")


async def _prove(instance: Instance) -> None:
    area = instance.memory.areas.area(1)
    witness = Witness(area)
    bus = BusWriter(packet_pipe().writer, lambda: None)
    try:
        parts = WorkerParts(instance, 0, area, bus=bus, faults=witness, clock=Clock())
        if parts.flow is not None:
            parts.flow.gate.read()
        usage, before = MemoryUsage(), 0
        for number in range(REQUESTS):
            await _decide(parts)
            if witness.first is not None:
                break
            if number == WARM:
                before = usage.over(0)
        grown = usage.over(0) - before if before else 0
        await parts.close()
    except PluginFault as fault:
        raise Unproven(f"error[trial]: {fault}") from fault
    except Exception as problem:
        plugin = culprit(problem)
        raise Unproven(_failed(plugin.name if plugin is not None else "", problem)) from problem
    if witness.first is not None:
        raise Unproven(_failed(*witness.first))
    if grown > LEAK_BYTES:
        raise Unproven(f"error[trial]: {REQUESTS - WARM} requests took {grown >> 20} MiB that they did not give back: a plugin leaks")


async def _decide(parts: WorkerParts) -> None:
    """Decides one request and ends its answer. Raises the exceptions of plugins."""
    app = parts.app
    body = BODY % (PROMPT, PROMPT)
    with contextlib.suppress(Refused):  # no endpoints, no parser for this body, or an admitter refuses
        headers = codec.headers_of({"x-request-id": "trial", ":path": COMPLETIONS})
        lease = Lease(app.pipelines, False, False)
        try:
            parser = app.pipelines.parser(COMPLETIONS)
        except Refused:
            headers = codec.headers_of({"x-request-id": "trial", ":path": CHAT})
            parser = app.pipelines.parser(CHAT)
        request = app.intake.begin(headers, time.monotonic(), len(body), None)
        app.intake.read(request, headers, lease.pipeline, parser, body)
        decision = await choose(lease.pipeline, request, app.pool)
        _answer(lease, request, decision)


def _answer(lease: Lease, request: Request, decision: Decision) -> None:
    pipeline = lease.pipeline
    response = Response(200, {"content-type": "application/json"})
    response.usage = Usage(len(PROMPT) // 4, 1)
    for received in pipeline.response_received:
        received(request, decision, response)
    for streaming in pipeline.response_streaming:
        streaming(request, decision)
    response.whole = True
    for complete in pipeline.response_complete:
        complete(request, decision, response)


def _failed(plugin: str, problem: BaseException) -> str:
    return f"error[trial]: plugin {plugin or '(unknown)'} failed in its first calls: {error_text(problem)}"


def _children() -> str:
    """Returns the ids of this process's children, or "" without children."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as children:
        return children.read().strip()
    return ""
