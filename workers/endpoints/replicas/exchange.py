"""The exchange with other replicas, in the supervisor: it publishes what this replica has, and merges what others publish.

    own lanes ─▶ OwnLoad, Waiting ─┐                              ┌─▶ Others ─▶ remote lane ─▶ workers
    bus ───────▶ Taught ───────────┴─▶ a message each TICK_S ─▶ store ─┴─▶ Taught ─▶ prefix index ─▶ workers

A message has all changes of one tick. A whole message follows each `WHOLE_S`. If nothing changes, a message that says only that this
replica lives follows each `ALIVE_S`. No request waits for any of this: workers read shared memory.

If the store fails, the exchange closes the link, logs one line, and connects again after a random delay, so that the replicas do not
arrive together. Meanwhile what others have in flight fades, and updates of the index wait in a bounded backlog. Nothing depends on
wall clocks.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple

import structlog

from shm.prefix_writer import IndexWriter
from shm.remote_lane import RemoteLane
from workers.endpoints.replicas.copying import SLICE_BUCKETS, merge, slices
from workers.endpoints.replicas.others import Others
from workers.endpoints.replicas.places import OwnLoad, Places
from workers.endpoints.replicas.store import Link, StoreError
from workers.endpoints.replicas.taught import Taught
from workers.endpoints.replicas.waiting import Waiting
from workers.endpoints.replicas.wire import EPOCH_MAX, FORM, Message, NotUsable, encode

TICK_S = 0.01
WHOLE_S = 1.0
ALIVE_S = 0.2
FADE_LOOK_S = 0.1  # between two looks for silent replicas while the store is away
RETRY_S = (0.1, 0.5)  # the random delay before the next attempt to connect
CONNECT_S = 3.0
COPY_S = 10.0  # from its start, a replica takes a copy of the prefix index
SAID_AGAIN_S = 60.0  # between two lines about the same problem
FOREIGN = (
    "replicas have different secrets of block hashes: they share no prefixes. Restart those that started while the store was away, "
    "or give all the same --prefix-secret-file"
)

Report = Callable[..., None]

log = structlog.get_logger()


class Exchange:
    """Exchanges with other replicas until its task is cancelled. The metrics page reads its attributes."""

    def __init__(
        self,
        parts: "Parts",
        *,
        name: str,
        most: int,
        secret: int,
        kept: bytes,
        now: Callable[[], float],
        ticks: Callable[[], int],
        report: Report,
    ) -> None:
        """`most`: how many other replicas count. `secret`: fingerprint of the seed of block hashes. `kept`: the seed as the store keeps it;
        empty: a file gives it, and the store keeps none. `ticks`: the clock of the index.
        """
        self.parts = parts
        self.others = Others(name, (0, random.getrandbits(62)), most)
        self.connected = False
        self.connections = self.sent = self.sent_bytes = self.foreign_blocks = 0
        self.failures: Counter[str] = Counter()  # why the store could not be used -> number
        self.lag_s = 0.0  # how long this replica's last whole message took to come back
        self._secret = secret
        self._kept = kept
        self._now = now
        self._ticks = ticks
        self._report = report
        self._sequence = 0
        self._silent = False  # another replica with this one's name has started later
        self._whole_at = self._alive_at = float("-inf")
        self._echo: tuple[int, float] | None = None  # sequence and time of the whole message that is not back yet
        self._wants = True  # a copy of the prefix index
        self._copy_until = now() + COPY_S
        self.copied = self.copied_slices = 0  # entries and slices from another replica's index
        self._copier: tuple[str, Iterator[bytes]] | None = None  # who gets a copy, and the slices that are left
        self._said: dict[str, float] = {}  # problem -> when it was logged last
        parts.remote.clear()

    async def run(self) -> None:
        """Connects, exchanges, and connects again after each failure."""
        while True:
            try:
                await self._connected()
            except StoreError as failure:
                self._failed(failure)
            except Exception as fault:  # the supervisor must not end by what others send
                log.debug("a fault in the exchange with other replicas", exc_info=True)
                self._failed(StoreError("error", f"a fault of the picker: {fault!r}"[:500]))
            self.connected = False
            until = self._now() + random.uniform(*RETRY_S)
            while (now := self._now()) < until:
                self._fade(now)
                await asyncio.sleep(FADE_LOOK_S)

    async def _connected(self) -> None:
        """Exchanges over one link until it fails. Raises StoreError."""
        link = await self._open()
        both = {asyncio.create_task(self._listen(link)), asyncio.create_task(self._speak(link))}
        try:
            (over, *_), _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            over.result()
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            await link.close()

    async def _speak(self, link: Link) -> None:
        """Publishes what is new, once per tick, until the link fails. Raises StoreError."""
        await self._begin(link)
        while True:
            started = self._now()
            self._fade(started)
            if self._silent and not self.others.superseded(started):
                await self._number(link, above=self.others.life[0])
                self._silent = False
            message = self._message(started)
            if message is not None:
                await link.publish(link.names.all, message)
            await self._send_copy(link)
            await asyncio.sleep(max(TICK_S / 2, TICK_S - (self._now() - started)))

    async def _open(self) -> Link:
        try:
            async with asyncio.timeout(CONNECT_S):
                return await self.parts.open_link(self.others.name)
        except TimeoutError:
            raise StoreError("slow", "the store did not answer in time") from None

    async def _begin(self, link: Link) -> None:
        """Gets the number of this connection, and publishes everything."""
        if self.others.life[0]:
            await self._remind(link)
        else:
            await self._number(link, above=0)
        self._whole_at = float("-inf")
        self.connected = True
        self.connections += 1
        if self.connections > 1 or self._said:
            self._said.clear()
            log.info("the replica store is back")
        await self._agree(link)

    async def _agree(self, link: Link) -> None:
        """Gives the secret of block hashes to a store that has none, so that replicas that start later get it."""
        if not self._kept:
            return
        try:
            if await link.agree(self._kept) != self._kept:
                self._say(FOREIGN, "the store has another secret")
        except StoreError as refused:  # an answer; messages pass all the same
            if refused.why in ("slow", "unreachable"):
                raise
            self._say(
                "the store has no secret of block hashes: replicas that start now share no prefixes", str(refused)
            )

    async def _number(self, link: Link, *, above: int) -> None:
        """Gets the number of this life of the replica from the store. Of two replicas with one name, the higher number counts."""
        try:
            epoch = await link.epoch(min(above + 1, EPOCH_MAX))
        except StoreError as refused:  # full, read-only, or the key is no number: messages pass all the same
            if refused.why not in ("full", "read-only", "error"):
                raise
            self._problem(refused)
            epoch = min(above + 1, EPOCH_MAX)
        self.others.life = (epoch, self.others.life[1])

    async def _remind(self, link: Link) -> None:
        """Tells a store that has lost its data how far numbers were: a later life of this replica must get a higher one."""
        try:
            await link.epoch(self.others.life[0])
        except StoreError as refused:  # with another reason, the store has answered
            if refused.why in ("slow", "unreachable"):
                raise

    async def _listen(self, link: Link) -> None:
        """Merges what comes, until the link fails. Raises StoreError."""
        while True:
            channel, data = await link.heard()
            now = self._now()
            if channel != link.names.all:
                self._copied(data)
                continue
            known = len(self.others.live)
            message = self.others.receive(data, now)
            if message is None:
                self._returned(now)
                continue
            if message.blocks:
                if message.secret == self._secret:
                    self.parts.taught.learn(message.blocks, self._ticks())
                else:
                    self.foreign_blocks += len(message.blocks)
                    self._say(FOREIGN, message.name)
            if message.wants and self._copier is None and self._first(message.name):
                self._copier = message.name, slices(self.parts.writer, self.parts.places, self._secret, self._ticks())
            if len(self.others.live) != known:
                log.info("replica appeared", replica=message.name, replicas=len(self.others.live) + 1)
            self._apply(now)

    def _returned(self, now: float) -> None:
        """Measures how long this replica's own message took, if it is back."""
        if self._echo is not None and self.others.echo >= self._echo[0]:
            self.lag_s = now - self._echo[1]
            self._echo = None

    def _first(self, joining: str) -> bool:
        """Whether this replica is the one that sends a copy of its index to a joining one."""
        return not self._wants and all(self.others.name < name for name in self.others.live if name != joining)

    async def _send_copy(self, link: Link) -> None:
        """Sends one slice, if a replica waits for a copy."""
        if self._copier is None:
            return
        name, left = self._copier
        part = next(left, None)
        if part is None:
            self._copier = None
        else:
            await link.publish(link.names.to(name), part)

    def _copied(self, data: bytes) -> None:
        """Takes one slice of another replica's index. After the first one, this replica wants no other copy."""
        if self._now() > self._copy_until or self.copied_slices > self.parts.writer.schema.buckets // SLICE_BUCKETS:
            return
        try:
            self.copied += merge(data, self.parts.writer, self.parts.places, self._secret, self._ticks())
            self.copied_slices += 1
        except NotUsable as refused:
            self.others.refused[refused.why] += 1
        self._wants = False

    def _message(self, now: float) -> bytes | None:
        """Returns the next message; None if there is nothing to say."""
        if self.others.superseded(now):
            self._say("another replica with this one's name has started later: this one is silent", self.others.name)
            self._silent = True
            return None
        if self.parts.places.refresh():
            self._whole_at = float("-inf")
            self._remap()
        if self._wants and now > self._copy_until:
            self._wants = False  # there is no other replica
        whole = now - self._whole_at >= WHOLE_S
        loads, blocks = self.parts.own.rows(whole=whole), self.parts.taught.take()
        flow = self.parts.waiting.bands(whole=whole)
        if not (whole or loads or blocks or flow or now - self._alive_at >= ALIVE_S):
            return None
        self._sequence += 1
        self._alive_at = now
        if whole:
            self._whole_at = now
            self._echo = self._sequence, now
        name, (epoch, origin) = self.others.name, self.others.life
        message = Message(
            FORM, name, epoch, origin, self._sequence, whole, self._secret, loads, flow, blocks, self._wants
        )
        data = encode(message)
        self.sent += 1
        self.sent_bytes += len(data)
        return data

    def _fade(self, now: float) -> None:
        """Forgets silent replicas, and renews the beat of the remote lane, so that it counts."""
        for name in self.others.expire(now):
            log.warning("replica is gone", replica=name, replicas=len(self.others.live) + 1)
        self._apply(now)

    def _apply(self, now: float) -> None:
        """Writes what has changed into the remote lane."""
        remote, slots = self.parts.remote, self.parts.places.slots
        for key, (requests, tokens) in self.others.take():
            slot = slots.get(key)
            if slot is not None:
                remote.set(slot, requests, tokens)
        if self.others.waiting_changed:
            self.others.waiting_changed = False
            self.parts.waiting.show(self.others.flows())
        remote.beat(now, len(self.others.live))

    def _remap(self) -> None:
        """Writes the remote lane anew, because endpoints came or left."""
        remote = self.parts.remote
        remote.clear()
        for key, slot in self.parts.places.slots.items():
            if (load := self.others.totals.get(key)) is not None:
                remote.set(slot, *load)

    def _failed(self, failure: StoreError) -> None:
        self._problem(failure)
        self._echo = None

    def _problem(self, failure: StoreError) -> None:
        self.failures[failure.why] += 1
        self._say("the replica store cannot be used: this replica goes on alone", str(failure))

    def _say(self, problem: str, why: str) -> None:
        """Logs a problem, but each only once in SAID_AGAIN_S."""
        now = self._now()
        if now - self._said.get(problem, float("-inf")) >= SAID_AGAIN_S:
            self._said[problem] = now
            self._report(problem, why=why)


class Parts(NamedTuple):
    """What an exchange works with. `open_link` connects to the store under the name of a replica, or raises StoreError."""

    open_link: Callable[[str], Awaitable[Link]]
    remote: RemoteLane
    places: Places
    own: OwnLoad
    taught: Taught
    writer: IndexWriter
    waiting: Waiting
