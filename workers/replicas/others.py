"""Merges the messages of other replicas: a state machine without clock and network. The caller passes time and messages.

A message has present values, never differences. So a lost, late or repeated message leads at worst to an old value until the next whole
message, at most a second later.

- A message is used if its (epoch, origin, sequence) is above that of the last message with the same name. A higher epoch begins a new life
  of the replica.
- A replica that was silent for `FADE_S` is ignored. Its last numbers stay known for `REMEMBERED_S`, so that older messages are never used.
- Of two replicas with one name, only messages of the one with the higher epoch are used. The other replica finds out by `superseded`, and
  becomes silent.
- At most `most` replicas are considered, with at most `ROWS_MAX` endpoints each. This module reads at most MESSAGES_MAX messages and
  BYTES_MAX bytes per second from each sender, so that a hostile sender cannot occupy the supervisor. A replica sends at most a message per
  half tick (200 a second) and drops its backlog beyond 1 MiB.
"""

from collections import Counter
from typing import Final

from compiled.calls import merge_loads
from workers.replicas.reading import decode, sender
from workers.replicas.wire import EPOCH_FOLLOWED_MAX, ONLY, POOLS_MAX, REQUESTS_MAX, ROW, ROWS_MAX, TOKENS_MAX, Flow, Message, NotUsable

FADE_S = 1.0
REMEMBERED_S = 30.0
REMEMBERED_MAX = 256  # names of replicas that are gone
SUPERSEDED_S = 2.0
MESSAGES_MAX: Final = 400
BYTES_MAX: Final = 8 << 20

Life = tuple[int, int]  # epoch, origin
Load = tuple[int, int]  # requests, tokens
NONE: Load = (0, 0)


class SenderRate:
    """Counts the messages and bytes of one sender in the current second."""

    __slots__ = ("_bytes", "_messages", "_since")

    def __init__(self, now: float) -> None:
        self._since = now
        self._messages = self._bytes = 0

    def exceeded(self, size: int, now: float) -> bool:
        """Counts a message of `size` bytes. Returns whether the sender exceeds the bound."""
        if now - self._since >= 1.0:
            self._since = now
            self._messages = self._bytes = 0
        self._messages += 1
        self._bytes += size
        return self._messages > MESSAGES_MAX or self._bytes > BYTES_MAX


class Other:
    """The last values of one other replica. `loads`: by the key of the endpoint, without endpoints that have no load.

    `flows`: the waiting requests, by the key of the pool. `secret`: the fingerprint of its seed of block hashes. `wants`: whether the
    replica wants a copy of the prefix index.
    """

    __slots__ = ("flows", "heard_at", "life", "loads", "rate", "secret", "sequence", "wants")

    def __init__(self, life: Life, now: float, rate: SenderRate) -> None:
        self.life = life
        self.sequence = self.secret = 0
        self.heard_at = now
        self.rate = rate
        self.wants = True
        self.loads: dict[int, Load] = {}
        self.flows: dict[int, Flow] = {}


class Others:
    """All other replicas. `totals`: their loads, by the key of the endpoint. `changed`: the keys with totals changed since `take`."""

    def __init__(self, name: str, life: Life, most: int) -> None:
        self.name = name
        self.life = life
        self.live: dict[str, Other] = {}
        self.totals: dict[int, Load] = {}
        self.refused: Counter[str] = Counter()  # reason for ignored messages -> number
        self.messages = self.bytes = self.lost = 0  # sums over all other replicas, since the start
        self.echo = 0  # the sequence of the last message of this replica that came back
        self.highest = 0  # the highest number of a replica's life so far, up to EPOCH_FOLLOWED_MAX
        self.stirred: set[int] = {ONLY}  # the keys of pools where the waiting requests may differ from the last result of `flows`
        self._changed: set[int] = set()
        self._most = most
        self._gone: dict[str, tuple[Life, int, float]] = {}  # name -> last life and sequence, time of the last message
        self._superseded_until = float("-inf")
        self._own_rate, self._strangers = SenderRate(float("-inf")), SenderRate(float("-inf"))

    def superseded(self, now: float) -> bool:
        """Returns whether another replica with the same name has started later and is alive."""
        return now < self._superseded_until

    def receive(self, data: bytes, now: float) -> Message | None:
        """Merges one message, and returns it if it is used. Otherwise, `refused` counts it, unless this replica sent it."""
        try:
            self._bound(data, now)
            message = decode(data)
            if self.highest < message.epoch <= EPOCH_FOLLOWED_MAX:
                self.highest = message.epoch
            if message.name == self.name:
                self._own(message, now)
                return None
            other = self._of(message, now)
        except NotUsable as refused:
            self.refused[refused.why] += 1
            return None
        if other.sequence:
            self.lost += message.sequence - other.sequence - 1
        other.sequence, other.heard_at = message.sequence, now
        other.secret, other.wants = message.secret, message.wants
        self.messages += 1
        self.bytes += len(data)
        self._merge(other, message)
        self._take_flows(other, message)
        return message

    def expire(self, now: float) -> list[str]:
        """Forgets the replicas that were silent for FADE_S. Returns their names."""
        silent = [name for name, other in self.live.items() if now - other.heard_at > FADE_S]
        for name in silent:
            other = self.live.pop(name)
            self._clear(other)
            self._gone[name] = (other.life, other.sequence, other.heard_at)
        for name in [name for name, (_, _, at) in self._gone.items() if now - at > REMEMBERED_S]:
            del self._gone[name]
        while len(self._gone) > REMEMBERED_MAX:
            del self._gone[next(iter(self._gone))]
        return silent

    def take(self) -> list[tuple[int, Load]]:
        """Returns the endpoints with totals that have changed since the last call, and these totals."""
        changed, self._changed = self._changed, set()
        totals = self.totals
        return [(key, totals.get(key, NONE)) for key in changed]

    def flows(self, pool: int = ONLY) -> list[Flow]:
        """Returns the waiting requests of a pool in each other replica that has published them."""
        return [flow for other in self.live.values() if (flow := other.flows.get(pool)) is not None]

    def of(self, key: int) -> dict[str, int]:
        """Returns the requests in flight at one endpoint: name of the other replica -> number."""
        return {name: other.loads[key][0] for name, other in self.live.items() if key in other.loads}

    def _own(self, message: Message, now: float) -> None:
        life = (message.epoch, message.origin)
        if life == self.life:
            self.echo = message.sequence
        elif life > self.life:
            self._superseded_until = now + SUPERSEDED_S
        else:
            raise NotUsable("old")

    def _bound(self, data: bytes, now: float) -> None:
        """Refuses a message beyond its sender's bound, before decoding the message. Raises NotUsable: "rate" or "many"."""
        name = sender(data)
        other = self.live.get(name)
        if other is not None:
            rate = other.rate
        elif name == self.name:
            rate = self._own_rate
        elif name and len(self.live) >= self._most:
            raise NotUsable("many")
        else:
            rate = self._strangers
        if rate.exceeded(len(data), now):
            raise NotUsable("rate")

    def _of(self, message: Message, now: float) -> Other:
        """Returns the sender's state. Raises NotUsable: "old" or "many"."""
        name, life = message.name, (message.epoch, message.origin)
        other = self.live.get(name)
        rate = other.rate if other is not None else SenderRate(now)
        if other is not None:
            if life < other.life or (life == other.life and message.sequence <= other.sequence):
                raise NotUsable("old")
            if life == other.life:
                return other
            self._clear(other)
        else:
            before, sequence, _ = self._gone.get(name, ((-1, -1), 0, 0.0))
            if life < before or (life == before and message.sequence <= sequence):
                raise NotUsable("old")
            if len(self.live) >= self._most:
                raise NotUsable("many")
            self._gone.pop(name, None)
        other = self.live[name] = Other(life, now, rate)
        return other

    def _take_flows(self, other: Other, message: Message) -> None:
        if message.flow is not None:
            other.flows[ONLY] = message.flow
            self.stirred.add(ONLY)
        if message.whole and len(other.flows) > len(message.flows):
            named = {each.pool for each in message.flows}
            for pool in [pool for pool in other.flows if pool not in named and pool != ONLY]:
                del other.flows[pool]
                self.stirred.add(pool)
        for each in message.flows:
            if each.pool in other.flows or len(other.flows) <= POOLS_MAX:
                other.flows[each.pool] = each.flow
                self.stirred.add(each.pool)

    def _merge(self, other: Other, message: Message) -> None:
        if message.whole:
            named = {key for key, _, _ in ROW.iter_unpack(message.loads)}
            self._set_loads(other, b"".join([ROW.pack(key, 0, 0) for key in other.loads if key not in named]))
        self._set_loads(other, message.loads)

    def _set_loads(self, other: Other, rows: bytes) -> None:
        merge_loads(other.loads, self.totals, self._changed, rows, REQUESTS_MAX, TOKENS_MAX, ROWS_MAX)

    def _clear(self, other: Other) -> None:
        self.stirred.update(other.flows)
        self._set_loads(other, b"".join([ROW.pack(key, 0, 0) for key in other.loads]))
