"""Settings of simulated servers that publish KV events. The module does not import ZeroMQ, so servers without events do not need it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

KEPT: Final = 10_000  # how many messages a server keeps for replays, as engines do
TOPIC: Final = "kv@{address}@{model}"


@dataclass(frozen=True, slots=True)
class EventSettings:
    """How the servers of a process publish. Server n (from 0) publishes on `port` + n and answers replays on `replay_port` + n.

    A `port` or `replay_port` of 0 means that there is no such port. `connect`: an address to connect to, instead of listening on `port` +
    n. `dialects`: one dialect for all servers, or one per server. `first`: the number of the first message. `kept`: how many messages are
    kept for replays. `replay_topics`: whether replays repeat the topic.
    """

    port: int = 0
    replay_port: int = 0
    connect: str = ""
    dialects: Sequence[str] = ("vllm",)
    topic: str = TOPIC
    first: int = 0
    kept: int = KEPT
    replay_topics: bool = True
