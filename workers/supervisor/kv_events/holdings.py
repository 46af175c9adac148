"""Keeps track of the blocks that endpoints hold: applies their events to the index of held blocks and to the table of links.

Changes of the index are collected, and `flush` writes them together, because one insert of a hundred entries costs little more than an
insert of one. If an entry changes several times before a flush, only the last change is written.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from epp.prefix import kv_events
from epp.prefix.blocks import NARROW, Hashes
from epp.prefix.held import adapter_word, held_links, held_root
from epp.prefix.kv_events import FULL_ATTENTION, Cleared, Removed, Stored
from epp.prefix.streams import WEIGHT_ONE, Tier
from shm.held_blocks import HeldWriter
from shm.index_capacity import OWNER_IDS
from shm.link_table import TIERS, Links, chosen, held_in, owners_of
from shm.prefix_writer import OwnersExhausted

ADAPTERS_MAX: Final = 4096
GROUPS_MAX: Final = 64
PENDING_MAX: Final = 100_000
EVENTS_AT_ONCE: Final = 1024  # events between two calls of `progress`
RESTORED_AT_ONCE: Final = 1 << 14  # entries of the index between two calls of `progress`
OTHER_TIER: Final = "other"
_NARROW: Final = np.uint64(NARROW)


class BlockCounts:
    """Counts for metrics. `malformed_batches` counts messages, `malformed_events` and `stores_skipped` count events, and the others count
    blocks.

    `removals_skipped` also counts an event of an unknown group as 1.
    """

    def __init__(self) -> None:
        self.stored = 0
        self.removed = 0
        self.malformed_events = 0
        self.malformed_batches = 0
        self.stores_skipped = 0
        self.removals_skipped = 0
        self.repeats_suppressed = 0
        self.removals_forwarded = 0
        self.links_refused = 0


class Holdings:
    """Applies changes to the blocks of all endpoints.

    `tiers`: (name, weight in thousandths) per tier. All other tiers together form one tier of weight 1.
    """

    def __init__(self, writer: HeldWriter, tiers: Sequence[tuple[str, int]], secret: int) -> None:
        self.writer = writer
        self.tiers = (*tiers[: TIERS - 1], (OTHER_TIER, WEIGHT_ONE))
        self.tier_of: Mapping[str, int] = {name: place for place, (name, _) in enumerate(self.tiers[:-1])}
        self.secret = secret
        self.counts = BlockCounts()
        self.progress: Callable[[], None] = _no_progress  # called during long work, so that the heartbeat goes on
        self.known_words: set[int] = set()
        self.owners_changed = False  # workers must learn new owner ids at once; the caller sets this back to False
        self._roots: dict[tuple[str, int], int] = {}
        self._age = 0  # the age of the index at the last flush
        # the changes in their order: links, their owner, whether the owner holds the blocks
        self._pending: list[tuple[Hashes, int, bool]] = []
        self._pending_blocks = 0

    def change(self, links: Hashes, owner: int, held: bool) -> None:
        """Collects a change: whether `owner` holds the blocks with these links."""
        if len(links):
            self._pending.append((links, owner, held))
            self._pending_blocks += len(links)

    @property
    def crowded(self) -> bool:
        """Returns whether so many changes are collected that they should be written at once."""
        return self._pending_blocks >= PENDING_MAX

    def flush(self, age: int) -> None:
        """Writes the collected changes to the index. `age`: the present tick of the index's clock."""
        self._age = age
        if not self._pending:
            return
        pending, self._pending, self._pending_blocks = self._pending, [], 0
        sizes = [len(links) for links, _, _ in pending]
        keys = np.concatenate([links for links, _, _ in pending]) & _NARROW
        owners = np.repeat(np.array([owner for _, owner, _ in pending], dtype=np.uint16), sizes)
        held = np.repeat(np.array([held for _, _, held in pending], dtype=np.bool_), sizes)
        order = np.lexsort((keys, owners))  # stable: changes of one entry stay in their order
        keys, owners, held = keys[order], owners[order], held[order]
        last = np.ones(len(keys), dtype=np.bool_)
        last[:-1] = (keys[1:] != keys[:-1]) | (owners[1:] != owners[:-1])
        gone, present = last & ~held, last & held
        self.writer.forget(keys[gone], owners[gone])
        self.writer.insert(keys[present], owners[present], age)

    def new_owner(self) -> int:
        """Returns an unused owner id. If all free ids wait for the sweep, sweeps everything first. Raises OwnersExhausted."""
        try:
            return self.writer.new_owner()
        except OwnersExhausted:
            self.flush(self._age)  # a collected change must not reach an id that is assigned again
            self.writer.sweep_all()
            return self.writer.new_owner()

    def restore(self, owners: Sequence[Sequence[int]], links: Links, age: int) -> None:
        """Fills the empty index and the empty table of links from a snapshot. `owners`: the owner ids of each endpoint, as in
        `Holder.owners`.

        Skips entries of other owners. `age`: the tick of the index's clock. Raises ValueError if the memory is in use.
        """
        # [tier, owner id in the first tier] -> owner id in this tier.
        owner_of = np.zeros((len(self.tiers), OWNER_IDS), dtype=np.uint16)
        for each in owners:
            owner_of[:, each[0]] = each[:-1]
        links = chosen(links, owner_of[0, owners_of(links)] != 0)
        self.writer.restore([owner for each in owners for owner in each], links)
        for tier in range(len(self.tiers)):
            held = chosen(links, held_in(links, tier))
            keys, ids = held.links & _NARROW, owner_of[tier, owners_of(held)]
            for first in range(0, len(keys), RESTORED_AT_ONCE):
                part = slice(first, first + RESTORED_AT_ONCE)
                self.writer.insert(keys[part], ids[part], age)
                self.progress()

    def root(self, adapter: str, block_tokens: int) -> int:
        """Returns the start of a chain of block keys for an adapter. Also learns the adapter's name."""
        key = (adapter, block_tokens)
        start = self._roots.get(key)
        if start is None:
            if len(self._roots) >= ADAPTERS_MAX:
                self._roots.clear()
            start = self._roots[key] = held_root(adapter, block_tokens, self.secret)
            if adapter and len(self.known_words) < ADAPTERS_MAX:
                self.known_words.add(adapter_word(adapter, self.secret))
        return start


class Holder:
    """Applies the events of one endpoint to its blocks. `group`: the group of KV caches whose blocks are used; None without groups."""

    def __init__(self, holdings: Holdings, owners: Sequence[int] = (), group: int | None = None) -> None:
        """`owners`, `group`: the values of a predecessor or a snapshot. Without `owners`, takes new owner ids."""
        self._holdings = holdings
        self.owners: list[int] = list(owners) or self._new_owners()
        self.block_tokens = 0
        self.malformed = 0  # malformed messages and events
        self.group = group
        self._groups: dict[int, str] = {} if group is None else {group: "full_attention"}
        self._adapters: dict[int | str, str] = {}  # the engine's id of an adapter -> its name
        # ids of adapters that no event has named: their blocks were skipped
        self._nameless: set[int | str] = set()

    @property
    def tiers(self) -> list[Tier]:
        """The endpoint's tiers: owner id, name and weight of each."""
        named = self._holdings.tiers
        return [Tier(owner, name, weight) for owner, (name, weight) in zip(self.owners, named, strict=False)]

    @property
    def speculative(self) -> int:
        """The owner id of the blocks that the endpoint will hold soon."""
        return self.owners[-1]

    @property
    def nameless(self) -> bool:
        """Whether the endpoint holds blocks of adapters that its events do not name. Requests name adapters, so they cannot be matched."""
        return bool(self._nameless)

    @property
    def partly_reused(self) -> bool:
        """Whether the engine has groups of another kind than full attention, such as a window. The groups must agree on the blocks that the
        engine reuses.
        """
        return any(kind and kind not in FULL_ATTENTION for kind in self._groups.values())

    @property
    def held(self) -> int:
        """The number of blocks that the endpoint holds, over all tiers."""
        return sum(map(self._holdings.writer.held, self.owners[:-1]))

    def clear(self) -> None:
        """Drops all blocks, because the endpoint holds none any more. Takes new owner ids."""
        for owner in self.owners:
            self._holdings.writer.retire(owner)
        self.owners = self._new_owners()
        self._nameless.clear()
        self._holdings.owners_changed = True

    def leave(self) -> None:
        """Drops all blocks, because the endpoint has left."""
        for owner in self.owners:
            self._holdings.writer.retire(owner)

    def apply(self, payload: bytes) -> None:
        """Applies a message to the index and the links. Counts a malformed message."""
        counts = self._holdings.counts
        try:
            batch = kv_events.decode(payload)
        except kv_events.MalformedBatch:
            counts.malformed_batches += 1
            self.malformed += 1
            return
        counts.malformed_events += batch.malformed
        self.malformed += batch.malformed
        for number, event in enumerate(batch.events, 1):
            if number % EVENTS_AT_ONCE == 0:
                self._holdings.progress()
            match event:
                case Stored():
                    self._stored(event)
                case Removed():
                    self._removed(event)
                case Cleared():
                    self.clear()

    def _new_owners(self) -> list[int]:
        owners: list[int] = []
        try:
            while len(owners) <= len(self._holdings.tiers):
                owners.append(self._holdings.new_owner())
        except OwnersExhausted:
            for owner in owners:
                self._holdings.writer.retire(owner)
            raise
        return owners

    def _counts_group(self, event: Stored) -> bool:
        """Returns whether the blocks of this event's group are used. Only one group is used: the lowest one with full attention."""
        group = event.group
        if group is None:
            return True
        kind = event.kind or self._groups.get(group, "full_attention" if group == 0 else "")
        if group not in self._groups and len(self._groups) < GROUPS_MAX:
            self._groups[group] = kind
        if kind not in FULL_ATTENTION:
            return False
        if self.group is None or group < self.group:
            if self.group is not None:
                self.clear()  # because the blocks so far are of another group
            self.group = group
        return group == self.group

    def _adapter(self, event: Stored) -> str | None:
        """Returns the name of the event's adapter. Older engines give only an id: then the name comes from another event with this id.
        Returns None if no event has named the id.
        """
        number = event.adapter_id
        if number is None:
            return event.adapter
        if event.adapter:
            if number in self._adapters or len(self._adapters) < ADAPTERS_MAX:
                self._adapters[number] = event.adapter
            self._nameless.discard(number)
        elif number not in self._adapters and len(self._nameless) < ADAPTERS_MAX:
            self._nameless.add(number)
        return event.adapter or self._adapters.get(number)

    def _stored(self, event: Stored) -> None:
        holdings = self._holdings
        adapter = self._adapter(event)
        if adapter is None or not self._counts_group(event):
            holdings.counts.stores_skipped += 1
            return
        tier = holdings.tier_of.get(event.tier, len(holdings.tiers) - 1)
        if event.tokens is None:
            self._moved(event.hashes, tier)
            return
        size, count = event.block_tokens, len(event.hashes)
        if len(event.tokens) != size * count:
            holdings.counts.stores_skipped += 1
            return
        start: int | None
        if event.parent is None:
            start = holdings.root(adapter, size)
        else:
            start = holdings.writer.links.link(event.parent, self.owners[0])
            holdings.root(adapter, size)  # learns the adapter's name
        if start is None:
            holdings.counts.stores_skipped += 1
            return
        self.block_tokens = size
        extras = dict(enumerate(event.extras)) if event.extras else {}
        self._hold(event.hashes, held_links(event.tokens, size, start, holdings.secret, extras), tier)

    def _moved(self, hashes: Sequence[int], tier: int) -> None:
        """Adds another tier to known blocks."""
        links, first = self._holdings.writer.links, self.owners[0]
        known = [(hash_, link) for hash_ in hashes if (link := links.link(hash_, first)) is not None]
        if len(known) < len(hashes):
            self._holdings.counts.stores_skipped += 1
        chain = np.array([link for _, link in known], dtype=np.uint64)
        self._hold([hash_ for hash_, _ in known], chain, tier)

    def _hold(self, hashes: Sequence[int], chain: Hashes, tier: int) -> None:
        holdings = self._holdings
        new, refused = holdings.writer.links.store(hashes, self.owners[0], tier, chain)
        holdings.change(new, self.owners[tier], True)
        holdings.counts.stored += len(new)
        holdings.counts.links_refused += refused

    def _removed(self, event: Removed) -> None:
        holdings, counts = self._holdings, self._holdings.counts
        if event.group is not None and event.group != self.group:
            counts.removals_skipped += event.group not in self._groups
            return
        tier = holdings.tier_of.get(event.tier, len(holdings.tiers) - 1)
        gone, held, unknown = holdings.writer.links.remove(event.hashes, self.owners[0], tier)
        holdings.change(gone, self.owners[tier], False)
        counts.removed += len(gone)
        counts.removals_forwarded += len(gone)
        counts.repeats_suppressed += held
        counts.removals_skipped += unknown


def _no_progress() -> None:
    """Does nothing."""
