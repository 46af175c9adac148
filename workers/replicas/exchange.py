"""The exchange with other replicas, in the supervisor: publishes the data of this replica, and merges the data of other replicas.

    own areas ─▶ OwnLoad, Waiting ─┐                              ┌─▶ Others ─▶ remote area ─▶ workers
    bus ───────▶ Taught ───────────┼─▶ a message each turn ─▶ store ─┼─▶ Taught ─▶ prefix index ─▶ workers
    scraper ───▶ Pages ────────────┤                              ├─▶ Pages ──▶ endpoint table ─▶ workers
    own rows ──▶ Budgets ──────────┘                              └─▶ Budgets ▶ row of others ──▶ workers

A turn reads all received messages, and then publishes all changes (`pace` decides when). Every `WHOLE_S`, the replica sends a whole
message. If nothing changes, it sends every `ALIVE_S` a message that says only that the replica is alive. No request waits for the exchange:
workers read shared memory.

If the store fails, the exchange closes the link, logs one line, and connects again. The delay doubles up to a limit, and is random, so that
the replicas do not arrive together. Meanwhile the known load of other replicas fades, and updates of the index wait in a bounded backlog.
Nothing depends on wall clocks.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import structlog

from shm.prefix_writer import IndexWriter
from shm.remote_area import RemoteArea
from workers.replicas.budgets import ReplicaBudgets
from workers.replicas.endpoint_places import OwnLoad, Places
from workers.replicas.joining import Joining
from workers.replicas.notices import Notices, Report
from workers.replicas.others import Others
from workers.replicas.pace import TurnPace
from workers.replicas.pages import Pages
from workers.replicas.store import StoreError, StoreLink
from workers.replicas.taught import Taught
from workers.replicas.waiting import Waiting, WaitingInPools
from workers.replicas.wire import EPOCH_MAX, FORM, ROWS_MAX, Message, encode

WHOLE_S = 1.0
ALIVE_S = 0.2
FADE_LOOK_S = 0.1  # between two looks for silent replicas and for endpoints that came or left
# Longest delay before the first attempt to connect again, and before any. A silent store is used again within 1 s of its return: an
# attempt that began before fails after ANSWER_S (`store`), and the next one follows after RETRY_MAX_S at the latest.
RETRY_MIN_S, RETRY_MAX_S = 0.1, 0.4
REFUSED_MAX_S = 0.8  # the same if the store refuses the replica, because an operator must change a setting
USED_S = 3.2  # after a link that lasted this long, the delays begin anew
CONNECT_S = 3.0  # including the questions to Sentinel or a cluster
KEEP_S = 10.0  # time between two checks that the store still has the data that replicas need
SETTLED_S = 1.0  # time after which a new replica has heard all other replicas
UNNUMBERED = "the replica store does not count replicas: of two with one name, the messages of the earlier one may be used"
AWAY = "the replica store cannot be used: this replica goes on alone"
FOREIGN = (
    "replicas have different secrets of block hashes: they share no prefixes. Restart those that started while the store was away, "
    "or give all the same --prefix-secret-file"
)

log = structlog.get_logger()


class Exchange:
    """Exchanges with other replicas until its task is cancelled. The metrics page reads its attributes."""

    def __init__(
        self,
        parts: "ExchangeParts",
        *,
        name: str,
        most: int,
        secret: int,
        kept: bytes,
        now: Callable[[], float],
        ticks: Callable[[], int],
        report: Report,
        pools: int = 1,
    ) -> None:
        """`most`: the largest number of other replicas to consider. `secret`: the fingerprint of the seed of block hashes. `kept`: the seed
        as the store keeps it, or empty if the seed comes from a file. `ticks`: the clock of the index. `pools`: the largest number of pools
        of the replica.
        """
        self.parts = parts
        self.others = Others(name, (0, random.getrandbits(62)), most)
        self.joining = Joining(parts.writer, parts.places, self.others, secret=secret, pools=pools)
        self.notices = Notices(now, report)
        self.pace = TurnPace()
        self.connected = False  # whether the store has accepted a whole message of this replica
        self.connections = self.sent = self.sent_bytes = self.foreign_blocks = 0
        self.failures: Counter[str] = Counter()  # why the store could not be used -> number
        self.lag_s = 0.0  # how long this replica's last whole message took to come back
        self._secret = secret
        self._kept = kept
        self._stored_differs = False  # whether the store has another secret
        self._now = now
        self._ticks = ticks
        self._sequence = 0
        self._last = b""  # the last message
        self._silent = False  # whether another replica with this one's name has started later
        self._offered = False  # whether a whole message has gone to the store
        self._announced = False  # whether the log says that the store is away
        self._attempts = 0  # the number of attempts to connect since the last lasting link
        self._received = False  # whether received data is not in shared memory yet
        self._whole_at = self._alive_at = float("-inf")
        self._keep_at = float("inf")
        self._new = False  # whether the store has given this replica its first number
        self._echo: tuple[int, float] | None = None  # sequence and time of the whole message that has not come back yet
        parts.remote.clear()

    @property
    def foreign(self) -> int:
        """The number of other replicas with another secret of block hashes, plus 1 if the store has another secret."""
        return self._stored_differs + sum(other.secret != self._secret for other in self.others.live.values())

    async def run(self) -> None:
        """Connects, exchanges, and connects again after each failure."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look_regularly())
            while True:
                started = self._now()
                try:
                    await self._connected()
                except StoreError as failure:
                    refused = failure.permanent
                    self._problem(failure)
                except Exception as fault:  # messages of other replicas must not end the supervisor
                    refused = False
                    log.debug("a fault in the exchange with other replicas", exc_info=True)
                    self._problem(StoreError("error", f"a fault of the picker: {fault!r}"[:500]))
                if self.connected and self._now() - started > USED_S:
                    self._attempts = 0
                self.connected = self._offered = False
                self._echo = None
                await asyncio.sleep(retry_delay(self._attempts, refused=refused))
                self._attempts += 1

    async def _look_regularly(self) -> None:
        """Forgets silent replicas, and updates the remote area when endpoints come or leave, even while the store does not answer."""
        while True:
            self._fade(self._now())
            await asyncio.sleep(FADE_LOOK_S)

    async def _connected(self) -> None:
        """Exchanges over one link until it fails. Raises StoreError."""
        link = await self._open()
        try:
            link.listen(lambda channel, data: self._heard(data, copy=channel != link.names.all))
            await self._speak(link)
        finally:
            link.close()

    async def _open(self) -> StoreLink:
        try:
            async with asyncio.timeout(CONNECT_S):
                return await self.parts.open_link(self.others.name)
        except TimeoutError:
            raise StoreError("slow", "the store did not answer in time") from None

    async def _speak(self, link: StoreLink) -> None:
        """Publishes everything, and then takes turns until the link fails. Raises StoreError."""
        if not self.others.life[0]:
            await self._number(link, above=max(self.parts.remote.epoch, self.others.highest))
            self._new = True
        await self._keep(link)
        self._whole_at = float("-inf")
        while True:
            await self.pace.run(lambda: self._turn(link))
            now = self._now()
            if self._silent:
                await self._number(link, above=self.others.life[0])
                self._silent = False
            if now >= self._keep_at:
                if self._new and self.others.highest > self.others.life[0]:  # the store had lost its count
                    await self._number(link, above=self.others.highest)
                self._new = False
                await self._keep(link)

    def _turn(self, link: StoreLink) -> bool:
        """Reads and publishes changes. Returns false if the next turn must wait for a question to the store. Raises StoreError."""
        now = self._now()
        link.check()
        if self._received:
            self._apply(now)
        if link.settled:  # otherwise the store is slow, and the next message will have more changes
            self._publish(link, now)
        return now < self._keep_at and not (self._silent and not self.others.superseded(now))

    def _publish(self, link: StoreLink, now: float) -> None:
        """Publishes changes, if the store has accepted the last message. Raises StoreError."""
        if self._offered and not self.connected:
            self._accepted()
        message = self._message(now)
        if message is not None:
            link.publish(link.names.all, message)
            self.pace.published()
            self._offered = True  # the first message over a link is a whole message
        if (part := self.joining.next_slice()) is not None:
            link.publish(link.names.to(part[0]), part[1])

    def _accepted(self) -> None:
        """Notes that the store has accepted a whole message, so that other replicas know the state of this replica."""
        self.connected = True
        self.connections += 1
        if self.connections == 1:
            self.joining.begin(self._now())
        if self._announced:
            self._announced = False
            log.info("the replica store is back")

    async def _number(self, link: StoreLink, *, above: int) -> None:
        """Gets the number of this life of the replica from the store. Of two replicas with one name, only messages of the one with the
        higher number are used.
        """
        try:
            epoch = await link.epoch(min(above + 1, EPOCH_MAX))
        except StoreError as refused:  # the store is full or read-only, or the key is no number; messages still pass
            if refused.why not in ("full", "read-only", "error"):
                raise
            self.failures[refused.why] += 1
            self.notices.problem(UNNUMBERED, str(refused))
            epoch = min(above + 1, EPOCH_MAX)
        self.others.life = (epoch, self.others.life[1])
        self.parts.remote.epoch = epoch
        self._whole_at = float("-inf")

    async def _keep(self, link: StoreLink) -> None:
        """Restores data that the store may have lost: the highest number, and the secret of block hashes. Raises StoreError."""
        self._keep_at = self._now() + (SETTLED_S if self._new else KEEP_S)
        try:
            await link.remind(self.others.life[0])
        except StoreError as refused:  # with another reason, the store has answered, and messages still pass
            if refused.why in ("slow", "unreachable"):
                raise
        if not self._kept:
            return
        try:
            self._stored_differs = await link.agree(self._kept) != self._kept
            if self._stored_differs:
                self.notices.problem(FOREIGN, "the store has another secret")
        except StoreError as refused:  # the store has answered; messages still pass
            if refused.why in ("slow", "unreachable"):
                raise
            self.notices.problem("the store has no secret of block hashes: replicas that start now share no prefixes", str(refused))

    def _heard(self, data: bytes, *, copy: bool) -> None:
        """Merges a message. `copy`: whether the message is a part of another replica's copy."""
        now = self._now()
        if copy:
            self.joining.take(data, now, self._ticks())
            return
        if data == self._last:  # this replica's own message comes back: nothing in it is new
            self.others.echo = self._sequence
            self._returned(now)
            return
        known = len(self.others.live)
        message = self.others.receive(data, now)
        if message is None:
            self._returned(now)
            return
        if message.secret != self._secret:
            self.foreign_blocks += message.learned is not None
            self.notices.problem(FOREIGN, message.name)
        else:
            self.parts.taught.learn(message.learned, message.taken_back)
            self.parts.budgets.hear(message.name, (message.epoch, message.origin), message.budgets, now, whole=message.whole)
        self.parts.pages.hear(message.pages, now)
        self.joining.asked(message, now, self._ticks())
        if len(self.others.live) != known:
            self.notices.appeared(message.name, len(self.others.live) + 1)
        self._received = True

    def _returned(self, now: float) -> None:
        """Measures how long this replica's own whole message took to come back. A message with another sequence number is a replay."""
        if self._echo is not None and self.others.echo == self._echo[0]:
            self.lag_s = now - self._echo[1]
            self._echo = None

    def _message(self, now: float) -> bytes | None:
        """Returns the next message, or None if nothing has changed."""
        if self.others.superseded(now):
            self.notices.problem("another replica with this one's name has started later: this one is silent", self.others.name)
            self._silent = True
            return None
        self._follow_endpoints()
        self.joining.look(now)
        whole = now - self._whole_at >= WHOLE_S
        loads, waits = self.parts.own.rows(whole=whole), self.parts.waiting.news(whole=whole)
        learned, taken_back = self.parts.taught.take()
        pages, budgets = self.parts.pages.take(now), self.parts.budgets.rows(now, whole=whole)
        if not (whole or loads or learned or taken_back or waits.any or pages or budgets or now - self._alive_at >= ALIVE_S):
            return None
        self._sequence += 1
        self._alive_at = now
        if whole:
            self._whole_at = now
            self._echo = self._sequence, now
            if left_out := self.parts.own.left_out:
                why = f"{left_out} endpoints beyond {ROWS_MAX}"
                self.notices.problem("too many endpoints have load: other replicas ignore the least loaded ones", why)
        name, (epoch, origin) = self.others.name, self.others.life
        message = Message(
            FORM, name, epoch, origin, self._sequence, whole, self._secret, loads, waits.flow, learned, taken_back,
            self.joining.wants, pages, budgets, list(waits.flows),
        )  # fmt: skip
        self._last = data = encode(message)
        self.sent += 1
        self.sent_bytes += len(data)
        return data

    def _fade(self, now: float) -> None:
        """Forgets silent replicas, and renews the heartbeat of the remote area, so that workers use this area."""
        self._follow_endpoints()
        for name in self.others.expire(now):
            self.notices.gone(name, len(self.others.live) + 1)
        self._apply(now)

    def _follow_endpoints(self) -> None:
        """If endpoints came or left, writes the remote area anew and publishes everything again: a slot may have another endpoint."""
        if not self.parts.places.refresh():
            return
        self._whole_at = float("-inf")
        remote = self.parts.remote
        remote.clear()
        for key, slot in self.parts.places.slots.items():
            if (load := self.others.totals.get(key)) is not None:
                remote.set(slot, *load)

    def _apply(self, now: float) -> None:
        """Writes the data of other replicas into the remote area, the prefix index and the endpoint table."""
        self._received = False
        self.parts.taught.apply(self._ticks())
        remote, slots = self.parts.remote, self.parts.places.slots
        for key, (requests, tokens) in self.others.take():
            slot = slots.get(key)
            if slot is not None:
                remote.set(slot, requests, tokens)
        if self.others.stirred:
            stirred, self.others.stirred = self.others.stirred, set()
            self.parts.waiting.show(stirred, self.others.flows)
        self.parts.pages.apply()  # after the loads, because from its page on, an endpoint's load is computed from these
        self.parts.budgets.show(self.others.live, now, connected=self.connected)
        remote.heartbeat(now, len(self.others.live))

    def pools_changed(self, waiting: Mapping[int, Waiting]) -> None:
        """Switches to other pools. `waiting`: the waiting requests of each pool, by the key of the pool."""
        self.parts.waiting.use(waiting)
        self.parts.places.renew()
        self.others.stirred.update(waiting)

    def _problem(self, failure: StoreError) -> None:
        self.failures[failure.why] += 1
        if self.notices.problem(AWAY, str(failure)):
            self._announced = True


class ExchangeParts(NamedTuple):
    """The parts of an exchange. `open_link` connects to the store under the name of a replica, or raises StoreError."""

    open_link: Callable[[str], Awaitable[StoreLink]]
    remote: RemoteArea
    places: Places
    own: OwnLoad
    taught: Taught
    writer: IndexWriter
    waiting: WaitingInPools
    pages: Pages
    budgets: ReplicaBudgets


def retry_delay(attempts: int, *, refused: bool) -> float:
    """Returns the seconds before the next attempt to connect: random, and doubled after each attempt up to a limit.

    `refused`: whether the store refuses this replica, so that another attempt alone does not help.
    """
    longest = min(RETRY_MIN_S * (1 << min(attempts, 16)), REFUSED_MAX_S if refused else RETRY_MAX_S)
    return longest * (1 + random.random()) / 2
