"""Reads the section `tenants`, checks files of keys, and makes the `Tenants` object of workers.

    section ─ read ─▶ TenantsEntry ─┬─▶ tenants_of ─▶ Tenants
    texts of the files of keys ─ keys_of ─▶ Keys ┘

Other code reads the files, because `epp` opens no file.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from epp.config import schema
from epp.config.control_headers import CONTROL_HEADERS
from epp.config.findings import WHOLE, ConfigError, ConfigErrors, Place
from epp.config.node_reader import NodeReader
from epp.config.written import (
    FLOW_CONTROL_GATE,
    NO_BUDGET,
    BudgetEntry,
    HeaderSource,
    KeySource,
    MetadataSource,
    OneTenantEntry,
    TenantsEntry,
    TenantSource,
    WrittenConfig,
)  # fmt: skip
from epp.config.yaml_nodes import Node
from epp.decision import response_needs
from epp.request import tenant_keys
from epp.request.budget import MINUTE_S, Bucket, Budget
from epp.request.client_headers import FAIRNESS_ID, TENANT_RULE, names_objective, names_tenant
from epp.request.tenant_keys import Keys
from epp.request.tenants import FromHeader, FromKey, FromMetadata, Salts, Source, Tenants

REFUSE: Final = "refuse"
SHARE: Final = "share"
OF_TENANT: Final = "tenant"
NO_SALT: Final = "none"
SHED: Final = "shed"
QUEUE: Final = "queue"
NO_LIMITS: Final = "none"
LIMITS: Final = ("tokensPerMinute", "requests", "concurrent")
OF_TOKENS: Final = ("burst", "cachedPrice")
BUDGET_RULE: Final = "tenant-budget"
PATH_NAMES_MAX: Final = 8
GROUP_RULE: Final = "a group has 1 to 64 printable characters, such as company"
SOURCES: Final = ("metadata", "header", "apiKey")
_HEADER: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,127}")


def read(reader: NodeReader, node: Node | None, at: Place) -> TenantsEntry | None:
    """Reads the section. Returns None if it is not given. `at`: the place of the section, even if the section's value is null.

    A null is an error here, because otherwise a section that was cut off would let all clients in.
    """
    if node is None and at == WHOLE:
        return None
    if node is None or not isinstance(node.value, dict):
        got = "nothing" if node is None else node.kind()
        reader.findings.error(at, "tenants", f"tenants: expected a mapping, got {got}", "remove it if there are no tenants")
        return None
    fields = reader.mapping(node, "tenants", schema.Tenants)
    listed = reader.sequence(fields.get("from"), "tenants.from")
    sources = [_source(reader, each, f"tenants.from[{index}]") for index, each in enumerate(listed)]
    if "from" not in fields or fields["from"].value == []:
        why = "tenants.from is empty: nothing says who sends a request"
        reader.findings.error(fields["from"].place if "from" in fields else at, "tenants", why, f"list one of {', '.join(SOURCES)}")
    unknown = reader.choice(fields, "unknown", (REFUSE, SHARE), "tenants", "tenants")
    salt = reader.choice(fields, "cacheSalt", (NO_SALT, OF_TENANT), "tenants", "tenants")
    return TenantsEntry(
        tuple(source for source in sources if source is not None),
        unknown == SHARE,
        _objectives(reader, fields.get("objectives"), "tenants.objectives"),
        _per_tenant(reader, fields.get("perTenant"), salted=salt == OF_TENANT),
        fields["cacheSalt"].place if salt == OF_TENANT else None,
        _budget(reader, fields.get("budget"), "tenants.budget"),
    )


def _per_tenant(reader: NodeReader, node: Node | None, *, salted: bool) -> dict[str, OneTenantEntry]:
    found: dict[str, OneTenantEntry] = {}
    for name, child in reader.entries(node, "tenants.perTenant").items():
        what = f"tenants.perTenant.{name[:128]}"
        if node is not None and not names_tenant(name):
            reader.findings.error(node.keys[name], "tenants", f"{what}: this is not a valid name", TENANT_RULE)
        fields = reader.mapping(child, what, schema.OneTenant)
        objectives = _objectives(reader, fields.get("objectives"), f"{what}.objectives")
        group = reader.text(fields.get("saltGroup"), f"{what}.saltGroup")
        if "saltGroup" in fields and not salted:
            hint = "write tenants.cacheSalt: tenant, or remove it"
            reader.findings.error(fields["saltGroup"].place, "tenants", f"{what}.saltGroup has no effect without cacheSalt", hint)
        elif "saltGroup" in fields and not names_tenant(group):
            reader.findings.error(fields["saltGroup"].place, "tenants", f"{what}.saltGroup: this is not a valid name", GROUP_RULE)
        budget = _budget(reader, fields.get("budget"), f"{what}.budget")
        found[name] = OneTenantEntry(objectives, budget, group)
    return found


def _objectives(reader: NodeReader, node: Node | None, what: str) -> tuple[str, ...]:
    nodes = reader.sequence(node, what)
    if node is not None and node.value == []:
        reader.findings.error(node.place, "tenants", f"{what} is empty", "name at least one objective, or omit it to allow all")
    found: list[str] = []
    for index, child in enumerate(nodes):
        name = reader.text(child, f"{what}[{index}]")
        if not name and child.value not in (None, ""):
            continue  # the value has a wrong type
        if not names_objective(name):
            why = f"{what}[{index}]: '{name[:128]}' is not the name of an InferenceObjective"
            reader.findings.error(child.place, "tenants", why, "it has lower-case letters, digits, '-' and '.'")
        elif name in found:
            reader.findings.error(child.place, "tenants", f"{what}: '{name}' is given twice")
        else:
            found.append(name)
    return tuple(found)


def _source(reader: NodeReader, node: Node, what: str) -> TenantSource | None:
    fields = reader.mapping(node, what, schema.TenantSource)
    given = [kind for kind in SOURCES if kind in fields]
    if len(given) != 1:
        if isinstance(node.value, dict) or node.value is None:
            got = " and ".join(given) or "none"
            reader.findings.error(node.place, "tenant-source", f"{what}: a source has one of {', '.join(SOURCES)}, not {got}")
        return None
    (kind,) = given
    if kind != "header":
        for extra in ("trusted", "passOn"):
            if extra in fields:
                why = f"{what}: '{extra}' belongs to a header"
                inside = f"; that of a key stands in {kind}" if (kind, extra) == ("apiKey", "passOn") else ""
                reader.findings.error(fields[extra].place, "tenant-source", why, f"remove it{inside}")
    kinds: Mapping[str, Callable[[], TenantSource | None]] = {
        "metadata": lambda: _metadata(reader, fields["metadata"], f"{what}.metadata"),
        "header": lambda: _header(reader, fields, what),
        "apiKey": lambda: _api_key(reader, fields["apiKey"], f"{what}.apiKey"),
    }
    return kinds[kind]()


def _required(reader: NodeReader, fields: Mapping[str, Node], name: str, what: str, at: Place) -> str:
    value = reader.text(fields.get(name), f"{what}.{name}")
    if not value and (name not in fields or fields[name].value == ""):
        reader.findings.error(fields[name].place if name in fields else at, "tenant-source", f"{what}: '{name}' is required")
    return value


def _metadata(reader: NodeReader, node: Node, what: str) -> MetadataSource | None:
    fields = reader.mapping(node, what, schema.TenantMetadata)
    if not isinstance(node.value, dict):
        return None
    namespace = _required(reader, fields, "namespace", what, node.place)
    path = _required(reader, fields, "path", what, node.place)
    if not namespace or not path:
        return None
    parts = tuple(path.split("."))
    if not all(parts) or len(parts) > PATH_NAMES_MAX:
        why = f"{what}.path: '{path[:128]}' is not a path"
        hint = f"write 1 to {PATH_NAMES_MAX} names with dots between them, such as payload.sub"
        reader.findings.error(fields["path"].place, "tenant-source", why, hint)
        return None
    return MetadataSource(namespace, parts)


def _name_of_header(reader: NodeReader, fields: Mapping[str, Node], what: str, at: Place) -> str:
    name = _required(reader, fields, "header", what, at).lower()
    if name and (not _HEADER.fullmatch(name) or (name in CONTROL_HEADERS and name not in FAIRNESS_ID)):
        why = f"{what}.header: '{name[:128]}' cannot name a tenant"
        reader.findings.error(fields["header"].place, "tenant-source", why, "name a plain header, such as x-tenant")
        return ""
    return name


def _header(reader: NodeReader, fields: Mapping[str, Node], what: str) -> HeaderSource | None:
    name = _name_of_header(reader, fields, what, fields["header"].place)
    passed_on = reader.boolean(fields.get("passOn"), f"{what}.passOn", True)
    if not reader.boolean(fields.get("trusted"), f"{what}.trusted", False):
        why = f"{what}: a client may set the header itself, unless the gateway sets or removes it in every request"
        hint = "make sure that the gateway does so, then write trusted: true beside it"
        reader.findings.error(fields["header"].place, "tenant-source", why, hint)
    return HeaderSource(name, passed_on) if name else None


def _api_key(reader: NodeReader, node: Node, what: str) -> KeySource | None:
    fields = reader.mapping(node, what, schema.TenantKeys)
    if not isinstance(node.value, dict):
        return None
    header = _name_of_header(reader, fields, what, node.place)
    file = _required(reader, fields, "file", what, node.place)
    passed_on = reader.boolean(fields.get("passOn"), f"{what}.passOn", False)
    return KeySource(header, file, passed_on, fields["file"].place) if header and file else None


def _budget(reader: NodeReader, node: Node | None, what: str) -> BudgetEntry | None:
    """Reads a budget. Returns None if the budget is not given or is no mapping."""
    fields = reader.mapping(node, what, schema.TenantBudget)
    if node is None or not isinstance(node.value, dict):
        return None
    mode = reader.choice(fields, "mode", (SHED, QUEUE, NO_LIMITS), what, BUDGET_RULE)
    if mode == NO_LIMITS:
        for name in fields.keys() - {"mode"}:
            reader.findings.error(
                fields[name].place, BUDGET_RULE, f"{what}.{name} has no effect beside mode: {NO_LIMITS}", "remove one of them"
            )
        return NO_BUDGET
    if not any(name in fields for name in LIMITS):
        reader.findings.error(node.place, BUDGET_RULE, f"{what}: there is no limit", f"give at least one of {', '.join(LIMITS)}")
    if "tokensPerMinute" not in fields:
        for name in OF_TOKENS:
            if name in fields:
                reader.findings.error(fields[name].place, BUDGET_RULE, f"{what}.{name} has no effect without tokensPerMinute", "give both")
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
    """Returns a limit, or 0 if it is not given. Refuses the limit 0: to stop a tenant, an operator takes its key or token away."""
    amount = reader.quantity(fields.get(name), f"{what}.{name}")
    if amount is None:
        return 0.0
    if amount.value < 1:
        hint = "give 1 or more; to let a tenant send nothing, take its key or its token away"
        reader.findings.error(amount.place, BUDGET_RULE, f"{what}.{name} is 0: it would refuse every request", hint)
    return amount.value


def _price(reader: NodeReader, node: Node | None, what: str) -> float:
    price = reader.number(node, what)
    if price is None:
        return 1.0
    if node is not None and not 0.0 <= price <= 1.0:
        reader.findings.error(node.place, BUDGET_RULE, f"{what}: {price:g} is not a price", "give 0 to 1; 1: as a token that is computed")
    return price


def check(reader: NodeReader, written: WrittenConfig) -> None:
    """Notes an error for each budget that contradicts the rest of the configuration."""
    for budget in written.tenants.budgets if written.tenants is not None else ():
        if budget.queue_place is not None and not written.gates[FLOW_CONTROL_GATE]:
            hint = f"add '{FLOW_CONTROL_GATE}' to featureGates, or write mode: {SHED}"
            reader.findings.error(budget.queue_place, BUDGET_RULE, "without flow control, no request waits", hint)
        if budget is not NO_BUDGET and written.response_phase == response_needs.NONE:
            why = f"requestHandler.responsePhase is {response_needs.NONE}, so nobody counts answers and requests in flight"
            reader.findings.error(budget.place, BUDGET_RULE, why, f"write '{response_needs.FULL}', or remove the budget")


# What the section means


def as_section(entry: TenantsEntry) -> dict[str, Any]:
    """Returns the section with its defaults, as plain values."""
    section: dict[str, Any] = {"from": [_as_source(source) for source in entry.sources], "unknown": SHARE if entry.shares else REFUSE}
    section["cacheSalt"] = NO_SALT if entry.salt_place is None else OF_TENANT
    if entry.objectives:
        section["objectives"] = list(entry.objectives)
    if entry.budget is not None:
        section["budget"] = _budget_section(entry.budget)
    if entry.per_tenant:
        section["perTenant"] = {name: _as_one(one) for name, one in entry.per_tenant.items()}
    return section


def _as_one(one: OneTenantEntry) -> dict[str, Any]:
    section: dict[str, Any] = {"objectives": list(one.objectives)} if one.objectives else {}
    if one.budget is not None:
        section["budget"] = _budget_section(one.budget)
    return section | ({"saltGroup": one.group} if one.group else {})


def _budget_section(entry: BudgetEntry) -> Any:
    if entry is NO_BUDGET:
        return {"mode": NO_LIMITS}
    section: dict[str, Any] = {}
    if entry.tokens:
        section |= {"tokensPerMinute": int(entry.tokens), "burst": int(entry.burst), "cachedPrice": entry.cached_price}
    section |= {name: int(limit) for name, limit in zip(LIMITS[1:], (entry.requests, entry.concurrent), strict=True) if limit}
    return section | {"mode": SHED if entry.queue_place is None else QUEUE}


def _as_source(source: TenantSource) -> dict[str, Any]:
    match source:
        case MetadataSource(namespace, path):
            return {"metadata": {"namespace": namespace, "path": ".".join(path)}}
        case HeaderSource(header, passed_on):
            return {"header": header, "trusted": True, "passOn": passed_on}
        case KeySource(header, file, passed_on):
            return {"apiKey": {"header": header, "file": file, "passOn": passed_on}}


def key_files(entry: TenantsEntry | None) -> dict[str, Place]:
    """Returns file of keys that the section names -> the first place that names the file."""
    found: dict[str, Place] = {}
    for source in entry.sources if entry is not None else ():
        if isinstance(source, KeySource):
            found.setdefault(source.file, source.place)
    return found


def keys_of(texts: Mapping[str, str]) -> dict[str, Keys]:
    """Reads files of keys. `texts`: path of a file -> its text. Raises ConfigErrors, with file and line."""
    found: dict[str, Keys] = {}
    errors: list[ConfigError] = []
    for path, text in texts.items():
        found[path], faults = tenant_keys.parse(text)
        errors += [ConfigError(path, fault.line, 1 if fault.line else 0, "tenant-keys", fault.why, fault.hint) for fault in faults]
    if errors:
        raise ConfigErrors(errors)
    return found


def tenants_of(entry: TenantsEntry, keys: Mapping[str, Keys], secret: int = 0) -> Tenants:
    """Returns the `Tenants` that workers ask. `keys`: path of a file of keys -> its keys. `secret`: the 64-bit seed of prefix hashes."""
    sources: Sequence[Source] = [_made(source, keys) for source in entry.sources]
    per_tenant = {name: one.objectives or entry.objectives for name, one in entry.per_tenant.items()}
    groups = {name: one.group for name, one in entry.per_tenant.items() if one.group}
    return Tenants(
        sources,
        shares=entry.shares,
        objectives=entry.objectives,
        per_tenant=per_tenant,
        salts=Salts(secret, groups) if entry.salt_place is not None else None,
        budget=_budget_of(entry.budget),
        budgets={name: _budget_of(one.budget) for name, one in entry.per_tenant.items() if one.budget is not None},
    )


def _budget_of(entry: BudgetEntry | None) -> Budget | None:
    """Returns the budget that workers enforce, or None if the entry has no limits."""
    if entry is None or entry is NO_BUDGET:
        return None
    return Budget(
        Bucket(entry.tokens / MINUTE_S, entry.burst) if entry.tokens else None,
        Bucket(entry.requests / MINUTE_S, entry.requests) if entry.requests else None,
        entry.concurrent,
        entry.cached_price,
        queues=entry.queue_place is not None,
    )


def _made(source: TenantSource, keys: Mapping[str, Keys]) -> Source:
    match source:
        case MetadataSource(namespace, path):
            return FromMetadata(namespace, path)
        case HeaderSource(header, passed_on):
            return FromHeader(header, passed_on)
        case KeySource(header, file, passed_on):
            return FromKey(header, passed_on, keys[file])
