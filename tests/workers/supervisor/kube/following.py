"""A reflector that follows things of a fake API server, in virtual time."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

from tests.reports import Reports
from tests.waiting import elapse, in_virtual_time
from tests.workers.supervisor.kube.fake import FakeApi
from workers.supervisor.kube.api import Resource
from workers.supervisor.kube.errors import Unreachable
from workers.supervisor.kube.known import ObjectChange
from workers.supervisor.kube.reflect import Outage, Reflector

THINGS = Resource("example.com", "v1", "things", "space")
AWAY = Unreachable("connection refused")


def decode(raw: bytes) -> str:
    """Decodes a thing to its text."""
    text = json.loads(raw).get("text", "")
    if text == "bad":
        raise ValueError("text: 'bad' is not allowed")
    return str(text)


class Followed:
    """A reflector with the fake server, its reports and its changes."""

    def __init__(self, api: FakeApi, *, expects: bool = False) -> None:
        self.api = api
        self.reports = Reports()
        self.changes: list[ObjectChange[str]] = []
        self.deletes: Counter[str] = Counter()
        self.reflector = Reflector(
            api,
            THINGS,
            decode=decode,
            changed=self._changed,
            report=self.reports,
            outage=Outage(self.reports),
            expects=expects,
            rng=random.Random(7),
        )

    def _changed(self, change: ObjectChange[str]) -> None:
        assert change.known == self.known
        self.changes.append(change)
        self.deletes.update(change.deleted.keys())

    @property
    def known(self) -> dict[str, str]:
        return dict(self.reflector.known)

    @property
    def truth(self) -> dict[str, str]:
        objects = self.api.install(THINGS).objects
        return {name: thing.get("text", "") for name, thing in objects.items()}


@contextlib.asynccontextmanager
async def following(api: FakeApi, *, expects: bool = False) -> AsyncIterator[Followed]:
    followed = Followed(api, expects=expects)
    task = asyncio.create_task(followed.reflector.run())
    try:
        await elapse(0.5)
        yield followed
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def things(count: int = 3) -> FakeApi:
    api = FakeApi()
    api.install(THINGS)
    for n in range(count):
        api.put(THINGS, f"t{n}", {"text": str(n)})
    return api


def scenario(main: Callable[[FakeApi, Followed], Any], api: FakeApi | None = None, *, expects: bool = False) -> None:
    async def run() -> None:
        server = api or things()
        async with following(server, expects=expects) as followed:
            await main(server, followed)

    in_virtual_time(run)
