"""Reads budgets of tenants, and makes the `Budget`s that workers keep to.

A limit of 0 is refused, because it would refuse every request: a tenant that may send nothing loses its key, or its token.
"""

from collections.abc import Mapping
from typing import Any, Final

from epp.config import schema
from epp.config.node_reader import NodeReader
from epp.config.written import NO_BUDGET, BudgetEntry
from epp.config.yaml_nodes import Node
from epp.request.budget import MINUTE_S, Bucket, Budget

NONE: Final = "none"
SHED: Final = "shed"
QUEUE: Final = "queue"
RULE: Final = "tenant-budget"
LIMITS: Final = ("tokensPerMinute", "requests", "concurrent")
OF_TOKENS: Final = ("burst", "cachedPrice")


def read(reader: NodeReader, node: Node | None, what: str) -> BudgetEntry | None:
    """Reads a budget. Returns None if it is not given, or is no mapping."""
    fields = reader.mapping(node, what, schema.TenantBudget)
    if node is None or not isinstance(node.value, dict):
        return None
    mode = reader.choice(fields, "mode", (SHED, QUEUE, NONE), what, RULE)
    if mode == NONE:
        for name in fields.keys() - {"mode"}:
            reader.findings.error(fields[name].place, RULE, f"{what}.{name} has no effect beside mode: {NONE}", "remove one of them")
        return NO_BUDGET
    if not any(name in fields for name in LIMITS):
        reader.findings.error(node.place, RULE, f"{what}: there is no limit", f"give at least one of {', '.join(LIMITS)}")
    if "tokensPerMinute" not in fields:
        for name in OF_TOKENS:
            if name in fields:
                reader.findings.error(fields[name].place, RULE, f"{what}.{name} has no effect without tokensPerMinute", "give both")
    tokens, burst, requests, concurrent = (_limit(reader, fields, name, what) for name in ("tokensPerMinute", "burst", *LIMITS[1:]))
    return BudgetEntry(
        tokens=tokens,
        burst=burst or tokens,
        requests=requests,
        concurrent=int(concurrent),
        cached_price=_price(reader, fields.get("cachedPrice"), f"{what}.cachedPrice"),
        queue_place=fields["mode"].place if mode == QUEUE else None,
        place=node.place,
    )


def _limit(reader: NodeReader, fields: Mapping[str, Node], name: str, what: str) -> float:
    """Returns a limit; 0 if it is not given."""
    amount = reader.quantity(fields.get(name), f"{what}.{name}")
    if amount is None:
        return 0.0
    if amount.value < 1:
        hint = "give 1 or more; to let a tenant send nothing, take its key or its token away"
        reader.findings.error(amount.place, RULE, f"{what}.{name} is 0: it would refuse every request", hint)
    return amount.value


def _price(reader: NodeReader, node: Node | None, what: str) -> float:
    price = reader.number(node, what)
    if price is None:
        return 1.0
    if node is not None and not 0.0 <= price <= 1.0:
        reader.findings.error(node.place, RULE, f"{what}: {price:g} is not a price", "give 0 to 1; 1: as a token that is computed")
    return price


def as_section(entry: BudgetEntry) -> Any:
    """Returns a budget with its defaults, as plain values."""
    if entry is NO_BUDGET:
        return {"mode": NONE}
    section: dict[str, Any] = {}
    if entry.tokens:
        section |= {"tokensPerMinute": int(entry.tokens), "burst": int(entry.burst), "cachedPrice": entry.cached_price}
    section |= {name: int(limit) for name, limit in zip(LIMITS[1:], (entry.requests, entry.concurrent), strict=True) if limit}
    return section | {"mode": SHED if entry.queue_place is None else QUEUE}


def budget_of(entry: BudgetEntry | None) -> Budget | None:
    """Returns what workers keep to; None without limits."""
    if entry is None or entry is NO_BUDGET:
        return None
    return Budget(
        Bucket(entry.tokens / MINUTE_S, entry.burst) if entry.tokens else None,
        Bucket(entry.requests / MINUTE_S, entry.requests) if entry.requests else None,
        entry.concurrent,
        entry.cached_price,
        queues=entry.queue_place is not None,
    )
