"""Budgets of tenants in one worker: what a request may use is checked before its decision, and counted as it is used.

    enter ─▶ Charge: the prompt, estimated ─▶ came: tokens of a streamed answer, at heartbeats ─▶ answered: as reported ─▶ end

The counts of all workers and replicas are in shared memory (`shm.budgets`). A worker reads those of the others at most every LOOK_S, so
that a flood of one tenant costs little.

- A prompt counts by the bytes of its body, times the tenant's average of counted prompt tokens per byte. When the server reports tokens,
  the difference is corrected.
- A streamed answer counts a token per piece, up to what was asked for, until the server reports.
- A request that gets no endpoint, and one that its server fails, uses no tokens.
- A request that waits behind all others because its tenant's budget is used up does not count: it takes only what nobody else wants.
"""

import hashlib
from typing import Final

from epp.decision.decision import Usage
from epp.request import BYTES_PER_TOKEN, USUAL, Request
from epp.request.budget import ANSWER_BYTES_PER_TOKEN, BEHIND, Budget, Left
from epp.request.tenant import Tenant
from shm.budgets import (
    IN_FLIGHT,
    KEY,
    KEY_MAX,
    LAPSED_REQUESTS,
    LAPSED_TOKENS,
    NOWHERE,
    PLAN,
    REQUESTS,
    TOKENS,
    TOUCHED,
    BudgetRow,
    Elsewhere,
)
from workers.worker.telemetry.request_metrics import Exchange

LOOK_S: Final = 0.002
ACCOUNTS_MAX: Final = 4096
ADAPT: Final = 0.125  # weight of the latest value in a moving average
PURPOSE: Final = b"epp tenant budget"[:16]
NEVER: Final = float("-inf")
NOTHING: Final = Elsewhere(0.0, 0.0, 0, NEVER, NEVER, NEVER, NEVER)


class Account:
    """What one tenant uses in this worker, and what is left of its budget."""

    __slots__ = ("_at", "_elsewhere", "_key", "_lapsed_requests", "_lapsed_tokens", "_looked_at", "_row", "budget", "open", "per_byte")

    def __init__(self, row: BudgetRow, key: int, budget: Budget, per_byte: float) -> None:
        self._row = row
        self._key = key
        self._at = NOWHERE
        self._elsewhere = NOTHING
        self._looked_at = NEVER
        self._lapsed_tokens = self._lapsed_requests = NEVER
        self.budget = budget
        self.per_byte = per_byte  # counted tokens per byte of a prompt
        self.open = 0  # charges that have not ended

    def left(self, now: float) -> Left:
        """Returns what is left of the budget. Writes down what has lapsed."""
        if now - self._looked_at > LOOK_S:
            self._look(now)
        row, budget, elsewhere, at = self._row, self.budget, self._elsewhere, self._place(now)
        words, floats = row.words, row.floats
        if words[at + PLAN] != budget.plan:
            words[at + PLAN] = 0
            floats[at + LAPSED_TOKENS], floats[at + LAPSED_REQUESTS] = self._lapsed_tokens, self._lapsed_requests
            words[at + PLAN] = budget.plan
        tokens = requests = 0.0
        if (bucket := budget.tokens) is not None:
            used = floats[at + TOKENS] + elsewhere.tokens
            full = now if self._lapsed_tokens != NEVER else max(now, elsewhere.full_tokens)
            lapsed = bucket.lapsed(used, full)
            if lapsed > self._lapsed_tokens:
                self._lapsed_tokens = floats[at + LAPSED_TOKENS] = lapsed
            tokens = bucket.left(used, self._lapsed_tokens, now)
        if (bucket := budget.requests) is not None:
            used = floats[at + REQUESTS] + elsewhere.requests
            full = now if self._lapsed_requests != NEVER else max(now, elsewhere.full_requests)
            lapsed = bucket.lapsed(used, full)
            if lapsed > self._lapsed_requests:
                self._lapsed_requests = floats[at + LAPSED_REQUESTS] = lapsed
            requests = bucket.left(used, self._lapsed_requests, now)
        return Left(budget, tokens, requests, words[at + IN_FLIGHT] + elsewhere.in_flight)

    def add(self, tokens: float, requests: int, in_flight: int, now: float) -> None:
        """Counts what is used, or, below 0, what is given back."""
        row, at = self._row, self._place(now)
        words, floats = row.words, row.floats
        floats[at + TOKENS] += tokens
        floats[at + REQUESTS] += requests
        words[at + IN_FLIGHT] = max(0, words[at + IN_FLIGHT] + in_flight)  # a place that was given away knows less
        floats[at + TOUCHED] = now
        row.changed()

    def learn(self, size: int, counted: float) -> None:
        """Learns what the prompt of a body of `size` bytes has counted."""
        if size > 0:
            self.per_byte += ADAPT * (min(1.0, counted / size) - self.per_byte)

    def _place(self, now: float) -> int:
        at = self._at
        if at == NOWHERE or self._row.words[at + KEY] != self._key:
            at = self._at = self._row.place(self._key, now)
        return at

    def _look(self, now: float) -> None:
        self._looked_at = now
        plan, row, at = self.budget.plan, self._row, self._place(now)
        elsewhere = self._elsewhere = row.elsewhere(self._key, plan)
        self._lapsed_tokens = max(self._lapsed_tokens, elsewhere.lapsed_tokens)
        self._lapsed_requests = max(self._lapsed_requests, elsewhere.lapsed_requests)
        if row.words[at + PLAN] == plan:
            self._lapsed_tokens = max(self._lapsed_tokens, row.floats[at + LAPSED_TOKENS])
            self._lapsed_requests = max(self._lapsed_requests, row.floats[at + LAPSED_REQUESTS])


class Charge:
    """What one request has used of its tenant's budget so far. `exchange`: its answer; None: it has no endpoint yet.

    `free`: whether it takes only what nobody else wants.
    """

    __slots__ = ("_account", "_answer", "_answered", "_budgets", "_most", "_prompt", "_size", "exchange", "free")

    def __init__(self, budgets: "Budgets", account: Account, request: Request, prompt: float, *, free: bool) -> None:
        extent = request.extent or USUAL
        limit = request.max_tokens
        self._budgets = budgets
        self._account = account
        self._size = request.body_bytes
        self._prompt = prompt  # what has counted of the prompt
        self._answer = 0.0  # what has counted of the answer
        self._most = float("inf") if limit is None else float(max(1, limit) * extent.choices * extent.prompts)
        self._answered = False
        self.exchange: Exchange | None = None
        self.free = free

    def came(self, now: float) -> None:
        """Counts what has come of a streamed answer since the last call."""
        exchange = self.exchange
        if exchange is None or not exchange.streaming or self._answered or self.free:
            return
        answer = min(float(exchange.pieces), self._most)
        if answer > self._answer:
            self._account.add(answer - self._answer, 0, 0, now)
            self._answer = answer

    def answered(self, usage: Usage | None, now: float, *, failed: bool) -> None:
        """Corrects what was counted by what the server reports at the end of its answer. `failed`: it has failed the request."""
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
        self._account.add(prompt - self._prompt + answer - self._answer, 0, 0, now)

    def end(self, now: float) -> None:
        """Counts the request as no longer in flight. One that got no endpoint has used nothing."""
        self._budgets.ended(self)
        account = self._account
        account.open -= 1
        if self.exchange is None and not self.free:
            account.add(-self._prompt, -1, -1, now)
        else:
            account.add(0.0, 0, -1, now)


class Budgets:
    """Knows the accounts of all tenants with a budget in one pool of one worker."""

    def __init__(self, row: BudgetRow, seed: int, pool: int = 0) -> None:
        """`row`: of this worker. `seed`: the 64-bit seed of prefix hashes. `pool`: the number of the pool."""
        self._row = row
        self._seed = seed
        self._pool = pool
        self._accounts: dict[Tenant, Account] = {}
        self._open: dict[Charge, None] = {}
        self._per_byte = 1.0 / BYTES_PER_TOKEN

    def enter(self, request: Request, tenant: Tenant, budget: Budget) -> Charge:
        """Counts a request that is about to be decided. Raises Refused if the budget is used up and does not let it wait."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._account(tenant, budget)
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
        """Counts what has come of all answers since the last heartbeat."""
        for charge in self._open:
            charge.came(now)

    def _account(self, tenant: Tenant, budget: Budget) -> Account:
        if len(self._accounts) >= ACCOUNTS_MAX:  # bounded, because a gateway may vouch for any number of tenants
            self._accounts = {tenant: account for tenant, account in self._accounts.items() if account.open}
        account = self._accounts[tenant] = Account(self._row, key_of(tenant.name, self._seed, self._pool), budget, self._per_byte)
        return account


def key_of(tenant: str, seed: int, pool: int = 0) -> int:
    """Returns the number that names a pool's tenant in shared memory and to other replicas. Without the seed, it does not tell the name."""
    digest = hashlib.blake2b(
        tenant.encode("utf-8", "surrogatepass"), digest_size=8, key=seed.to_bytes(8, "little") + pool.to_bytes(4, "little"), person=PURPOSE
    ).digest()
    return int.from_bytes(digest, "little") & KEY_MAX or 1
