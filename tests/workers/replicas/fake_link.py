"""A link to a store of one test, without a network: it keeps what is published, and says what the test says."""

from collections.abc import Callable
from typing import Any

from workers.replicas.store import StoreError, StoreNames


class FakeLink:
    """`refusing`: why the store refuses a count of the epoch and a secret, if it does. `echoes`: whether own messages come back.

    `first`: the number that the store gives first. `unsettled`: why it refuses messages, if it does.
    """

    def __init__(self, *, refusing: str = "", echoes: bool = True, first: int = 1, unsettled: str = "") -> None:
        self.names = StoreNames("p", cluster=False)
        self.refusing, self.echoes, self.unsettled = refusing, echoes, unsettled
        self.first = first
        self.settled = True
        self.published: list[tuple[str, bytes]] = []
        self.numbers: list[int] = []
        self.fault: Exception | None = None
        self._hear: Callable[[str, bytes], None]

    def listen(self, hear: Callable[[str, bytes], None]) -> None:
        self._hear = hear

    def says(self, data: bytes) -> None:
        """Sends a message to all."""
        self._hear(self.names.all, data)

    async def epoch(self, least: int) -> int:
        self.numbers.append(least)
        if self.refusing:
            raise StoreError(self.refusing, "refused by the test")
        return max(self.first, least)

    async def remind(self, least: int) -> None:
        pass

    async def agree(self, offered: bytes) -> bytes:
        if self.refusing:
            raise StoreError(self.refusing, "refused by the test")
        return offered

    def publish(self, channel: str, data: bytes) -> None:
        self.published.append((channel, data))
        if self.echoes:
            self._hear(channel, data)

    def check(self) -> None:
        if self.fault is not None:
            raise self.fault
        if self.published and self.unsettled:
            raise StoreError(self.unsettled, "refused by the test")

    def close(self) -> None:
        pass


def links(*made: FakeLink) -> Any:
    """Returns an `open_link` that gives these, one after the other, and the last one again."""
    left = list(made)

    async def open_link(_: str) -> FakeLink:
        return left.pop(0) if len(left) > 1 else left[0]

    return open_link
