"""Budgets of tenants in one worker: checks the budget before the decision of a request, and counts the use of the request.

    enter ─▶ Charge: the prompt, estimated ─▶ came: tokens of a streamed answer, at heartbeats ─▶ answered: as reported ─▶ end

The counts of all workers and replicas are in shared memory (`shm.budgets`). A worker reads the counts of the other workers and replicas at
most every LOOK_S, so that a flood of one tenant costs little.

- The tokens of a prompt are estimated as the bytes of its body, times the tenant's average of tokens per byte. When the server reports
  tokens, the difference is corrected.
- While an answer streams, each piece is counted as one token, up to the requested number, until the server reports the tokens.
- A request without an endpoint, or with a failed answer, uses no tokens.
- A request that waits behind all others, because its tenant's budget is used up, is not counted: it takes only capacity that no other
  request wants.
"""

import hashlib
from typing import Final

from epp.decision.decision import Usage
from epp.request import BYTES_PER_TOKEN, USUAL, Request, Tenant
from epp.request.budget import ANSWER_BYTES_PER_TOKEN, BEHIND, Budget, Left
from shm.budgets import KEY_MAX, NOWHERE, BudgetRow
from workers.worker.telemetry.request_metrics import Exchange

LOOK_S: Final = 0.002
ACCOUNTS_MAX: Final = 4096
ADAPT: Final = 0.125  # weight of the latest value in a moving average
PURPOSE: Final = b"epp tenant budget"[:16]
NEVER: Final = float("-inf")


class TenantAccount:
    """The use of one tenant in this worker, and the rest of its budget."""

    __slots__ = (
        "_full_requests", "_full_tokens", "_key", "_lapsed_requests", "_lapsed_tokens", "_looked_at", "_other_in_flight", "_other_requests",
        "_other_tokens", "_place", "_row", "budget", "open", "per_byte",
    )  # fmt: skip

    def __init__(self, row: BudgetRow, key: int, budget: Budget, per_byte: float, now: float) -> None:
        self._row = row
        self._key = key
        self._place = row.place(key, now)
        self._looked_at = NEVER
        self._other_tokens = self._other_requests = 0.0  # what other workers and replicas have used
        self._other_in_flight = 0
        self._full_tokens = self._full_requests = NEVER  # the times at which these others expect the buckets to be full
        self._lapsed_tokens = self._lapsed_requests = NEVER
        self.budget = budget
        self.per_byte = per_byte  # counted tokens per byte of a prompt
        self.open = 0  # charges that have not ended

    def left(self, now: float) -> Left:
        """Returns the rest of the budget."""
        looks = now - self._looked_at > LOOK_S
        if looks:
            self._look(now)
        budget, place = self.budget, self._place
        tokens = requests = 0.0
        if (bucket := budget.tokens) is not None:
            used = place.tokens + self._other_tokens
            full = now if self._lapsed_tokens != NEVER else max(now, self._full_tokens)
            self._lapsed_tokens = max(self._lapsed_tokens, bucket.lapsed(used, full))
            tokens = bucket.left(used, self._lapsed_tokens, now)
        if (bucket := budget.requests) is not None:
            used = place.requests + self._other_requests
            full = now if self._lapsed_requests != NEVER else max(now, self._full_requests)
            self._lapsed_requests = max(self._lapsed_requests, bucket.lapsed(used, full))
            requests = bucket.left(used, self._lapsed_requests, now)
        if looks:
            place.plan, place.lapsed_tokens, place.lapsed_requests = budget.plan, self._lapsed_tokens, self._lapsed_requests
            self._row.lapse(place)
        return Left(budget, tokens, requests, place.in_flight + self._other_in_flight)

    def add(self, tokens: float, requests: int, in_flight: int, now: float) -> None:
        """Counts use; negative numbers give use back."""
        place = self._place
        if place.at == NOWHERE:
            place = self._place = self._row.place(self._key, now)
        place.tokens += tokens
        place.requests += requests
        place.in_flight = max(0, place.in_flight + in_flight)  # a reused place has a lower count
        self._row.store(place, now)

    def learn(self, size: int, counted: float) -> None:
        """Learns that the prompt of a body of `size` bytes had `counted` tokens."""
        if size > 0:
            self.per_byte += ADAPT * (min(1.0, counted / size) - self.per_byte)

    def _look(self, now: float) -> None:
        """Reads the use by other workers and replicas, and the use that has lapsed according to them."""
        self._looked_at = now
        place = self._place
        if place.at == NOWHERE:
            place = self._place = self._row.place(self._key, now)
        plan = self.budget.plan
        elsewhere = self._row.elsewhere(self._key, plan)
        self._other_tokens, self._other_requests, self._other_in_flight = elsewhere.tokens, elsewhere.requests, elsewhere.in_flight
        self._full_tokens, self._full_requests = elsewhere.full_tokens, elsewhere.full_requests
        self._lapsed_tokens = max(self._lapsed_tokens, elsewhere.lapsed_tokens)
        self._lapsed_requests = max(self._lapsed_requests, elsewhere.lapsed_requests)
        if place.plan == plan and plan:  # stored by a predecessor, or by an account with the same limits
            self._lapsed_tokens = max(self._lapsed_tokens, place.lapsed_tokens)
            self._lapsed_requests = max(self._lapsed_requests, place.lapsed_requests)


class Charge:
    """What one request has used of its tenant's budget so far. `exchange`: its answer; None before it has an endpoint.

    `free`: whether the request takes only capacity that no other request wants.
    """

    __slots__ = ("_account", "_answer", "_answered", "_budgets", "_correction", "_most", "_prompt", "_size", "exchange", "free")

    def __init__(self, budgets: "Budgets", account: TenantAccount, request: Request, prompt: float, *, free: bool) -> None:
        extent = request.extent or USUAL
        limit = request.max_tokens
        self._budgets = budgets
        self._account = account
        self._size = request.body_bytes
        self._prompt = prompt  # counted tokens of the prompt
        self._answer = 0.0  # counted tokens of the answer
        self._most = float("inf") if limit is None else float(max(1, limit) * extent.choices * extent.prompts)
        self._answered = False
        self._correction = 0.0  # the correction of both, at the end
        self.exchange: Exchange | None = None
        self.free = free

    def came(self, now: float) -> None:
        """Counts the tokens of a streamed answer since the last call."""
        exchange = self.exchange
        if exchange is None or not exchange.streaming or self._answered or self.free:
            return
        answer = min(float(exchange.pieces), self._most)
        if answer > self._answer:
            self._account.add(answer - self._answer, 0, 0, now)
            self._answer = answer

    def answered(self, usage: Usage | None, *, failed: bool) -> None:
        """Notes the tokens that the server reports at the end of its answer. `failed`: whether the answer has failed."""
        exchange = self.exchange
        if self._answered or self.free or exchange is None:
            return
        self._answered = True
        prompt, answer = self._prompt, min(float(exchange.pieces), self._most)
        if not exchange.streaming:
            answer = min(exchange.size / ANSWER_BYTES_PER_TOKEN, self._most)
        if usage is not None and usage.prompt is not None:
            cached = float(usage.cached or 0)
            prompt = usage.prompt - cached + cached * self._account.budget.cached_price
            self._account.learn(self._size, prompt)
        if usage is not None and usage.completion is not None:
            answer = float(usage.completion)
        if failed or (usage is None and not exchange.pieces):
            prompt = answer = 0.0
        self._correction = prompt - self._prompt + answer - self._answer

    def end(self, now: float) -> None:
        """Corrects the counts, and takes the request out of the requests in flight. A request without an endpoint has used nothing."""
        self._budgets.ended(self)
        account = self._account
        account.open -= 1
        if self.exchange is None and not self.free:
            account.add(-self._prompt, -1, -1, now)
        else:
            account.add(self._correction, 0, -1, now)


class Budgets:
    """Knows the accounts of all tenants with a budget in one pool of one worker."""

    def __init__(self, row: BudgetRow, seed: int, pool: str = "") -> None:
        """`row`: the row of this worker. `seed`: the 64-bit seed of prefix hashes. `pool`: the name of the pool, or "" for the only
        pool.
        """
        self._row = row
        self._seed = seed
        self._pool = pool
        self._accounts: dict[Tenant, TenantAccount] = {}
        self._open: dict[Charge, None] = {}
        self._per_byte = 1.0 / BYTES_PER_TOKEN

    def enter(self, request: Request, tenant: Tenant, budget: Budget) -> Charge:
        """Counts a request that is about to be decided. Raises Refused if the budget is used up and does not let the request wait."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._account(tenant, budget, request.now)
        now, prompt = request.now, request.body_bytes * account.per_byte
        left = account.left(now)
        free = not left.admits(prompt)
        if free:
            if not budget.queues:
                raise left.refusal(prompt)
            request.priority = BEHIND
        charge = Charge(self, account, request, prompt, free=free)
        account.add(0.0 if free else prompt, 0 if free else 1, 1, now)
        account.open += 1
        self._open[charge] = None
        return charge

    def ended(self, charge: Charge) -> None:
        """Forgets a charge that ends."""
        self._open.pop(charge, None)

    def heartbeat(self, now: float) -> None:
        """Counts the tokens of all answers since the last heartbeat."""
        for charge in self._open:
            charge.came(now)

    def _account(self, tenant: Tenant, budget: Budget, now: float) -> TenantAccount:
        if len(self._accounts) >= ACCOUNTS_MAX:  # bounded, because a gateway may vouch for any number of tenants
            self._accounts = {tenant: account for tenant, account in self._accounts.items() if account.open}
        key = key_of(tenant.name, self._seed, self._pool)
        account = self._accounts[tenant] = TenantAccount(self._row, key, budget, self._per_byte, now)
        return account


def key_of(tenant: str, seed: int, pool: str = "") -> int:
    """Returns the number that names a pool's tenant in shared memory and to other replicas. Without the seed, the number does not reveal
    the name.
    """
    named = hashlib.blake2b(pool.encode(), digest_size=16).digest() if pool else bytes(4)
    key = seed.to_bytes(8, "little") + named
    digest = hashlib.blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=8, key=key, person=PURPOSE).digest()
    return int.from_bytes(digest, "little") & KEY_MAX or 1
