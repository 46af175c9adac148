"""Has the settings with which simulated servers publish KV events. Does not import ZeroMQ: servers without events do not need it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

KEPT: Final = 10_000  # how many messages a server keeps for replays, as engines do
TOPIC: Final = "kv@{address}@{model}"


@dataclass(frozen=True, slots=True)
class EventSettings:
    """How the servers of a process publish. Server n uses the port `port` + n, and for replays `replay_port` + n; 0: it has no such port.

    `connect`: an address to connect to, instead of listening on a port. `dialects`: one for all servers, or one per server.
    `first`: the number of the first message. `kept`: how many messages are kept for replays.
    """

    port: int = 0
    replay_port: int = 0
    connect: str = ""
    dialects: Sequence[str] = ("vllm",)
    topic: str = TOPIC
    first: int = 0
    kept: int = KEPT
    replay_topics: bool = True
