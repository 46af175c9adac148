"""Asks the endpoints of several pools at /v1/models for their models and adapters, and publishes the lists for workers.

    EndpointTable: endpoints ─▶ ModelPages ─ one GET per endpoint in EVERY_S ─▶ models of each pool ─▶ document

This module asks only endpoints of pools that are chosen by model, at the address where they serve requests. New endpoints come first. Each
look asks at most AT_ONCE endpoints, each on its own connection, which is closed afterwards: with thousands of endpoints, a round takes
minutes. An answer takes at most SHARE of a server's time. An endpoint that fails keeps its last list, and is asked less and less often
until it leaves.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from epp.plugins.extractors._pages import ExtractError
from epp.plugins.extractors.models import models_of
from epp.protocol.models import PATH, Model
from workers.shared.documents import Served
from workers.supervisor.endpoints.discovery import EndpointSpec, Name
from workers.supervisor.endpoints.http_answer import HttpError
from workers.supervisor.endpoints.http_client import Connected, Dialer, get_request

LOOK_S: Final = 1.0
EVERY_S: Final = 30.0
LONGEST_S: Final = 240.0
AGAIN_S: Final = 2.0  # the pause after the first failure; each further failure doubles it, up to FAILING_S
FAILING_S: Final = 60.0
SHARE: Final = 0.001  # the share of a server's time that its answers may take
AT_ONCE: Final = 64
ANSWER_S: Final = 2.0
FAILURES_TO_LOG: Final = 5
LOG_EVERY_S: Final = 60.0


class Unlisted(Exception):
    """An endpoint gives no list of its models. The text says why."""


class _Get:
    """One GET. Implements `workers.supervisor.endpoints.http_client.Caller`."""

    def __init__(self, spec: EndpointSpec, answer: "asyncio.Future[bytes]") -> None:
        self.server = spec.server
        self._request = get_request(spec.server or spec.host, spec.port, PATH)
        self._answer = answer

    def connected(self, connection: Connected) -> None:
        self._answer.add_done_callback(lambda _: connection.close())
        connection.get(self._request)

    def unreachable(self, failure: OSError) -> None:
        self._failed(str(failure))

    def answered(self, connection: Connected, page: bytes) -> None:
        if not self._answer.done():
            self._answer.set_result(page)

    def garbled(self, connection: Connected, failure: HttpError) -> None:
        self._failed(str(failure))

    def lost(self, connection: Connected, failure: Exception | None) -> None:
        self._failed(f"the connection ended before the answer{f': {failure}' if failure else ''}")

    def _failed(self, why: str) -> None:
        if not self._answer.done():
            self._answer.set_exception(Unlisted(why))


async def get(dialer: Dialer, spec: EndpointSpec) -> bytes:
    """Returns the endpoint's answer. Raises Unlisted."""
    answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    attempt = dialer.dial(spec.host, spec.port, _Get(spec, answer))
    try:
        async with asyncio.timeout(ANSWER_S):
            return await answer
    except TimeoutError:
        raise Unlisted(f"no answer within {ANSWER_S:g} s") from None
    finally:
        answer.cancel()
        attempt.cancel()


@dataclass(slots=True)
class _Asked:
    """An endpoint. `due`: the time of the next question. `models`: the models of its last answer."""

    spec: EndpointSpec
    due: float = 0.0
    failures: int = 0
    models: Sequence[Model] = ()


class ModelPages:
    """Keeps the models of all followed endpoints."""

    def __init__(
        self,
        get: Callable[[EndpointSpec], Awaitable[bytes]],
        publish: Callable[[Served], None],
        report: Callable[..., None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`get(spec)` returns an endpoint's answer, or raises Unlisted. `publish`: called with the models of all pools when they have
        changed. `now`: monotonic seconds.
        """
        self._get = get
        self._publish = publish
        self._report = report
        self._now = now
        self._asked: dict[Name, _Asked] = {}
        self._changed = False
        self._log_at = 0.0

    def follow(self, specs: Iterable[EndpointSpec]) -> None:
        """Asks these endpoints from now on, and no others."""
        before, self._asked = self._asked, {}
        for spec in specs:
            known = before.pop(spec.identity, None)
            same = known is not None and (known.spec.host, known.spec.port, known.spec.uid) == (spec.host, spec.port, spec.uid)
            if known is not None and not same:
                self._changed |= bool(known.models)
            self._asked[spec.identity] = known if known is not None and same else _Asked(spec)
        self._changed |= any(gone.models for gone in before.values())

    async def look(self) -> None:
        """Asks the endpoints that are due, at most AT_ONCE. Publishes the models if they have changed."""
        now = self._now()
        due = sorted((each for each in self._asked.values() if each.due <= now), key=lambda each: each.due)[:AT_ONCE]
        await asyncio.gather(*map(self._ask, due))
        if self._changed:
            self._changed = False
            self._publish(self.served())

    def served(self) -> Served:
        """Returns the models of each pool, by their ids. Joins the details of a model from several endpoints."""
        pools: dict[int, dict[str, Model]] = {}
        for asked in self._asked.values():
            known = pools.setdefault(asked.spec.pool, {})
            for model in asked.models:
                known[model.id] = _joined(known[model.id], model) if model.id in known else model
        return {pool: [models[name] for name in sorted(models)] for pool, models in sorted(pools.items()) if models}

    async def _ask(self, asked: _Asked) -> None:
        begun = self._now()
        try:
            found = models_of(await self._get(asked.spec))
        except (Unlisted, ExtractError) as failure:
            asked.failures += 1
            asked.due = self._now() + min(AGAIN_S * 2 ** min(asked.failures - 1, 10), FAILING_S)
            if asked.failures == FAILURES_TO_LOG:
                self._say(asked.spec, str(failure))
            return
        now = self._now()
        asked.failures, asked.due = 0, now + min(max(EVERY_S, (now - begun) / SHARE), LONGEST_S)
        self._changed |= found != asked.models and asked.spec.identity in self._asked
        asked.models = found

    def _say(self, spec: EndpointSpec, why: str) -> None:
        """Reports at most once in LOG_EVERY_S."""
        if (now := self._now()) >= self._log_at:
            self._log_at = now + LOG_EVERY_S
            failing = sum(each.failures >= FAILURES_TO_LOG for each in self._asked.values())
            self._report("endpoints do not list their models", count=failing, last=f"{spec.name} {spec.host}:{spec.port}", reason=why)


def _joined(one: Model, other: Model) -> Model:
    return Model(one.id, one.root or other.root, one.parent or other.parent, one.max_model_len or other.max_model_len)
