"""A link to a store of one test, without a network: it keeps what is published, and hears what the test says."""

import asyncio
from typing import Any

from workers.endpoints.replicas.store import Names, StoreError


class FakeLink:
    """`refusing`: why the store refuses a count of the epoch and a secret, if it does. `echoes`: whether own messages come back.

    `first`: the number that the store gives first. `unsettled`: why it refuses messages, if it does.
    """

    def __init__(self, *, refusing: str = "", echoes: bool = True, first: int = 1, unsettled: str = "") -> None:
        self.names = Names("p", cluster=False)
        self.refusing, self.echoes, self.unsettled = refusing, echoes, unsettled
        self.first = first
        self.published: list[tuple[str, bytes]] = []
        self.heard_next: asyncio.Queue[Any] = asyncio.Queue()
        self.numbers: list[int] = []

    async def epoch(self, least: int) -> int:
        self.numbers.append(least)
        if self.refusing:
            raise StoreError(self.refusing, "refused by the test")
        return max(self.first, least)

    async def remind(self, least: int) -> None:
        pass

    async def settle(self) -> None:
        if self.unsettled:
            raise StoreError(self.unsettled, "refused by the test")

    async def agree(self, offered: bytes) -> bytes:
        if self.refusing:
            raise StoreError(self.refusing, "refused by the test")
        return offered

    async def publish(self, channel: str, data: bytes) -> None:
        self.published.append((channel, data))
        if self.echoes:
            self.heard_next.put_nowait((channel, data))

    async def heard(self) -> tuple[str, bytes]:
        said = await self.heard_next.get()
        if isinstance(said, Exception):
            raise said
        return said  # type: ignore[no-any-return]

    async def close(self) -> None:
        pass


def links(*made: FakeLink) -> Any:
    """Returns an `open_link` that gives these, one after the other, and the last one again."""
    left = list(made)

    async def open_link(_: str) -> FakeLink:
        return left.pop(0) if len(left) > 1 else left[0]

    return open_link
