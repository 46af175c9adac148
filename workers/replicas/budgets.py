"""Budgets over replicas. Messages say what tenants have used at this replica; a row, which workers add, has what tenants have used at other
replicas.

A message has totals since the sender's start, so a lost message changes nothing: the receiver counts by how much a total has grown since
the last message of the same life of the sender. The first message of a life only says where its totals stand. A message also says when
buckets will be full, for replicas that have not seen the tenant before.

While the store is away, the use at other replicas is unknown. Then the replica assumes that each tenant still uses as much per second at
other replicas as before, but at most the share that the others would have if all replicas had equal shares. So each replica continues with
its last share, or with an equal share if that is larger. When messages arrive again, the replica takes the assumed use back, because their
totals include all use.

Tenants have keys (`workers.worker.extproc.budgets.key_of`), because their names must not reach the store.
"""

from collections.abc import Collection
from typing import Final

from shm.budgets import NOBODY, BudgetRow, BudgetSums, Sum
from workers.replicas.wire import BUDGET, BUDGETS_MAX

SAY_S: Final = 0.05  # time between two looks at what tenants use at this replica
TICK_S: Final = 1.0  # time between two measurements of the speed
ADAPT: Final = 0.2  # weight of the latest second in an average
HEARD_MAX: Final = 64  # the number of remembered names of replicas
Life = tuple[int, int]


class _Tenant:
    """The use of one tenant at other replicas. `rate_*`: per second. `own_*`: the use at this replica. `assumed_*`: the use that was
    assumed while no replica was heard.
    """

    __slots__ = ("assumed_requests", "assumed_tokens", "new_requests", "new_tokens", "own", "own_rate", "rate_requests", "rate_tokens")

    def __init__(self) -> None:
        self.new_tokens = self.new_requests = 0.0  # tokens and requests since the last tick
        self.rate_tokens = self.rate_requests = self.own_rate = 0.0
        self.assumed_tokens = self.assumed_requests = 0.0
        self.own: Sum | None = None  # this replica's own sum at the last tick


class ReplicaBudgets:
    """Joins the budgets of this replica with those of other replicas. `row`: the row with the use at other replicas."""

    def __init__(self, sums: BudgetSums, row: BudgetRow) -> None:
        row.take_over()
        self._sums = sums
        self._row = row
        self._changes = 0
        self._said: dict[int, Sum] = {}
        self._say_at = self._tick_at = self._now = float("-inf")
        self._heard: dict[str, tuple[Life, dict[int, Sum]]] = {}  # name -> the life of its last message, and its totals
        self._tenants: dict[int, _Tenant] = {}
        self._stirred: set[int] = set()  # tenants with possible changes of their requests in flight at other replicas
        self._live: frozenset[str] = frozenset()
        self._others = 0  # the number of other replicas when the store was last in use
        self._assuming = False

    def rows(self, now: float, *, whole: bool) -> bytes:
        """Returns the use of tenants at this replica: of all tenants if `whole`, else of tenants with more use since the last call."""
        if not whole and now < self._say_at:
            return b""
        changes = self._sums.changes()
        if not whole and changes == self._changes:
            return b""
        self._changes, self._say_at = changes, now + SAY_S
        before, self._said = self._said, self._sums.sums(now)
        rows = [
            BUDGET.pack(key, *used)
            for key, used in self._said.items()
            if any(used[:3]) and (whole or before.get(key, NOBODY)[:3] != used[:3])
        ]
        return b"".join(rows[:BUDGETS_MAX])

    def hear(self, name: str, life: Life, rows: bytes, now: float, *, whole: bool) -> None:
        """Reads what another replica says. Adds the amounts by which its totals have grown. A `whole` message has all totals, so of each
        life, the first message that is used is a whole message, even if it is empty.
        """
        known, totals = self._heard.pop(name, ((-1, -1), {}))
        first = known != life
        if first and not whole:
            self._heard[name] = known, totals
            return
        self._take_back(now)
        if first:
            self._stirred.update(totals)
            totals = {}
        self._heard[name] = life, totals
        if len(self._heard) > HEARD_MAX:
            del self._heard[next(iter(self._heard))]
        for key, tokens, requests, in_flight, fills_tokens, fills_requests in BUDGET.iter_unpack(rows):
            before = totals.get(key)
            if before is None and len(totals) >= BUDGETS_MAX:
                continue
            totals[key] = Sum(tokens, requests, in_flight)
            if before is None and first:
                before = totals[key]
            elif before is None:
                before = Sum(0.0, 0.0, 0)
            self._stirred.add(key)
            if tokens != before.tokens or requests != before.requests:
                self._count(key, tokens - before.tokens, requests - before.requests, now)
            place = self._row.place(key, now)
            place.lapsed_tokens = max(place.lapsed_tokens, now + fills_tokens)  # another replica may know a later time
            place.lapsed_requests = max(place.lapsed_requests, now + fills_requests)
            self._row.lapse(place)

    def show(self, live: Collection[str], now: float, *, connected: bool) -> None:
        """Writes what tenants have in flight at other replicas. `live`: the replicas that are heard. `connected`: whether the store is in
        use.

        Without the store, continues with the last known values.
        """
        passed, self._now = now - self._now, now
        if not connected and self._others:
            self._assume(min(passed, TICK_S), now)
            return
        names = frozenset(live)
        if names != self._live:
            for name in names ^ self._live:
                if name in self._heard:
                    self._stirred.update(self._heard[name][1])
            self._live, self._others = names, len(names)
        if self._stirred:
            stirred, self._stirred = self._stirred, set()
            for key in stirred:
                self._fly(key, self._flying(key), now)
        if now >= self._tick_at:
            self._tick(min(now - self._tick_at + TICK_S, 10 * TICK_S), now)

    def _flying(self, key: int) -> int:
        totals = [self._heard[name][1].get(key) for name in self._live if name in self._heard]
        return sum(total.in_flight for total in totals if total is not None)

    def _fly(self, key: int, in_flight: int, now: float) -> None:
        place = self._row.place(key, now)
        place.in_flight = in_flight
        self._row.store(place, now)

    def _count(self, key: int, tokens: float, requests: float, now: float) -> None:
        tenant = self._tenants.get(key)
        if tenant is None:
            if len(self._tenants) >= BUDGETS_MAX:
                del self._tenants[next(iter(self._tenants))]
            tenant = self._tenants[key] = _Tenant()
        tenant.new_tokens += tokens
        tenant.new_requests += requests
        self._write(key, tokens, requests, now)

    def _write(self, key: int, tokens: float, requests: float, now: float) -> None:
        place = self._row.place(key, now)
        place.tokens += tokens
        place.requests += requests
        self._row.store(place, now)

    def _tick(self, seconds: float, now: float) -> None:
        """Measures how fast each tenant uses its budget, at this replica and at other replicas."""
        self._tick_at = now + TICK_S
        for key, tenant in self._tenants.items():
            own = self._said.get(key)
            if own is not None and tenant.own is not None:
                tenant.own_rate += ADAPT * ((own.tokens - tenant.own.tokens) / seconds - tenant.own_rate)
            tenant.own = own
            tenant.rate_tokens += ADAPT * (tenant.new_tokens / seconds - tenant.rate_tokens)
            tenant.rate_requests += ADAPT * (tenant.new_requests / seconds - tenant.rate_requests)
            tenant.new_tokens = tenant.new_requests = 0.0

    def _assume(self, seconds: float, now: float) -> None:
        """Adds the assumed use at other replicas, because the real use is unknown."""
        equal = self._others / (1 + self._others)
        if not self._assuming:
            self._assuming = True
            for key in self._tenants:
                own = self._said.get(key)
                flying = self._flying(key)
                self._fly(key, min(flying, int(equal * (flying + (own.in_flight if own is not None else 0)))), now)
        for key, tenant in self._tenants.items():
            if tenant.rate_tokens <= 0.0 and tenant.rate_requests <= 0.0:
                continue
            everywhere = tenant.rate_tokens + max(0.0, tenant.own_rate)
            share = min(1.0, equal * everywhere / tenant.rate_tokens) if tenant.rate_tokens > 0.0 else equal
            tokens, requests = seconds * share * max(0.0, tenant.rate_tokens), seconds * share * max(0.0, tenant.rate_requests)
            tenant.assumed_tokens += tokens
            tenant.assumed_requests += requests
            self._write(key, tokens, requests, now)

    def _take_back(self, now: float) -> None:
        if not self._assuming:
            return
        self._assuming = False
        for key, tenant in self._tenants.items():
            self._write(key, -tenant.assumed_tokens, -tenant.assumed_requests, now)
            tenant.assumed_tokens = tenant.assumed_requests = 0.0
            self._stirred.add(key)
