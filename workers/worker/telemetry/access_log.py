"""Logs a line per request, or for a share of the requests, at its end: --access-log.

A line has the request's id, tenant, models, target, status, times and, if it has no target, the cause. It has no part of a prompt.
"""

import random
from typing import TYPE_CHECKING

import structlog

from epp.decision.decision import NO_USAGE, Decision
from epp.request import Request
from workers.host.log import REQUEST

if TYPE_CHECKING:
    from workers.worker.telemetry.request_metrics import Exchange

log = structlog.get_logger()


class AccessLog:
    """Writes the lines of one worker. `share`: the share of the requests that are logged, above 0 to 1."""

    def __init__(self, share: float, rng: random.Random) -> None:
        self._share = share
        self._rng = rng

    def refused(self, request: Request, cause: str, received_at: float, now: float) -> None:
        """Logs a request that the picker refused. Times are monotonic seconds."""
        if self._rng.random() < self._share:
            log.info(REQUEST, **_of(request), target="", refused=cause, total_ms=_ms(now - received_at))

    def turned_away(self, request_id: str, cause: str, received_at: float, now: float) -> None:
        """Logs a request that the picker refused before it read its body, so that tenant and model are unknown."""
        if self._rng.random() < self._share:
            log.info(REQUEST, request_id=request_id, target="", refused=cause, total_ms=_ms(now - received_at))

    def ended(self, exchange: "Exchange", request: Request, decision: Decision, status: int, now: float) -> None:
        """Logs a request that got an endpoint. `status`: the status of its answer, or 0 without an answer."""
        if self._rng.random() >= self._share:
            return
        first_s, usage = exchange.first_s, exchange.usage or NO_USAGE
        log.info(
            REQUEST,
            **_of(request),
            target=decision.targets[0].address,
            status=status,
            whole=exchange.whole,
            picked_ms=_ms(exchange.decided_at - exchange.received_at),
            first_ms=_ms(first_s) if first_s == first_s else None,
            total_ms=_ms(now - exchange.received_at),
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            output_tokens=usage.completion,
        )


def _of(request: Request) -> dict[str, object]:
    return {
        "request_id": request.id,
        "flow": request.fairness_id,
        "priority": request.priority,
        "model": request.model,
        "target_model": request.target_model,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)
