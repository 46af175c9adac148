"""Finds the tenant of a request, by the first configured source that gives a valid name.

    metadata of the gateway (as of its JWT filter) ─┐
    a header that the gateway sets                 ─┼─▶ name ─▶ Tenant, or Refused
    an API key                                     ─┘

Only metadata that come with the request's headers are used, not the metadata of later messages. What the client says about its tenant is
never used.
"""

import hashlib
import hmac
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from epp.errors import Cause, Refused
from epp.protocol import codec
from epp.request.budget import Budget
from epp.request.client_headers import FAIRNESS_ID, as_utf8, names_tenant
from epp.request.request import Tenant
from epp.request.tenant_keys import Keys

KEPT_MAX: Final = 4096
PURPOSE: Final = b"epp tenant salt"
SALT_CHARS: Final = 32  # 128 bits
GROUP: Final = "group\0"  # no tenant's name begins like this
NO_GROUPS: Final[Mapping[str, str]] = {}
NO_BUDGETS: Final[Mapping[str, Budget | None]] = {}
NO_OBJECTIVES: Final[Mapping[str, Sequence[str]]] = {}


UNKNOWN: Final = "unknown"  # the tenant that all requests without a known tenant share, if the operator wants that


class Source:
    """A source of names. `header`: the header that the source reads, or "". `passed_on`: whether model servers get this header."""

    def __init__(self, header: str = "", passed_on: bool = False) -> None:
        self.header = header
        self.passed_on = passed_on

    def name(self, headers: codec.Headers, message: bytes) -> str:
        """Returns the name that the source gives, or "". `message`: the ProcessingRequest with the headers. Raises ProtocolViolation."""
        raise NotImplementedError


class FromMetadata(Source):
    """Takes the text, or the whole number, at a path of the gateway's metadata."""

    def __init__(self, namespace: str, path: Sequence[str]) -> None:
        super().__init__()
        self._namespace = namespace.encode()
        self._path = tuple(name.encode() for name in path)

    def name(self, headers: codec.Headers, message: bytes) -> str:
        return codec.metadata_text(message, self._namespace, self._path)


class FromHeader(Source):
    """Takes the value of a header that the gateway sets or removes."""

    def name(self, headers: codec.Headers, message: bytes) -> str:
        value = headers.sent(self.header)
        return "" if value is None else as_utf8(value)


class FromKey(Source):
    """Takes the tenant of the API key in a header."""

    def __init__(self, header: str, passed_on: bool, keys: Keys) -> None:
        super().__init__(header, passed_on)
        self._keys = keys

    def name(self, headers: codec.Headers, message: bytes) -> str:
        value = headers.sent(self.header)
        return self._keys.tenant(value) if value else ""


class Salts:
    """Makes cache salts. A salt is the HMAC, under a secret, of the name of a tenant or of the tenant's group. Without the secret, nobody
    can compute a salt from the name.
    """

    def __init__(self, secret: int, groups: Mapping[str, str] = NO_GROUPS) -> None:
        """`secret`: the 64-bit seed of prefix hashes; salts do not reveal it. `groups`: tenant -> group; others have their own salts."""
        self._groups = dict(groups)
        self._key = hashlib.blake2b(secret.to_bytes(8, "little"), person=PURPOSE).digest()

    def of(self, name: str) -> str:
        """Returns the salt of a tenant: SALT_CHARS hexadecimal digits."""
        group = self._groups.get(name)
        salted = name if group is None else GROUP + group
        return hmac.digest(self._key, salted.encode("utf-8", "surrogatepass"), "sha256").hex()[:SALT_CHARS]


class Tenants:
    """Knows the tenants of all requests under one configuration. Keeps the last tenants, because requests repeat names."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        shares: bool = False,
        objectives: Sequence[str] = (),
        per_tenant: Mapping[str, Sequence[str]] = NO_OBJECTIVES,
        salts: Salts | None = None,
        budget: Budget | None = None,
        budgets: Mapping[str, Budget | None] = NO_BUDGETS,
    ) -> None:
        """`shares`: whether requests without a known tenant share the tenant UNKNOWN; if not, they are refused.

        `objectives`: see `Tenant`. `per_tenant`: name of a tenant -> the tenant's own objectives. `salts`: None if tenants get no salts.
        `budget`: the budget of each tenant without an entry in `budgets`; None without limits.
        """
        self._sources = tuple(sources)
        self._shares = shares
        self._objectives = tuple(objectives)
        self._per_tenant = {name: tuple(listed) for name, listed in per_tenant.items()}
        self._salts = salts
        self._budget = budget
        self._budgets = dict(budgets)
        self._kept: dict[str, Tenant] = {}

    def of(self, headers: codec.Headers, message: bytes) -> Tenant:
        """Returns the tenant of the request with these headers. `message`: the ProcessingRequest with the headers.

        Raises Refused if the tenant is unknown, and ProtocolViolation for malformed headers or metadata.
        """
        for source in self._sources:
            name = source.name(headers, message)
            if name and (name in self._kept or names_tenant(name)):
                return self.named(name)
        if headers.problem is not None:
            raise headers.problem
        if not self._shares:
            raise Refused(Cause.UNKNOWN_TENANT)
        return self.named(UNKNOWN)

    def named(self, name: str) -> Tenant:
        """Returns the tenant with this name."""
        tenant = self._kept.get(name)
        if tenant is None:
            if len(self._kept) >= KEPT_MAX:  # bounded, because a gateway may name any number of tenants
                self._kept.clear()
            salt = self._salts.of(name) if self._salts is not None else ""
            objectives, budget = self._per_tenant.get(name, self._objectives), self._budgets.get(name, self._budget)
            tenant = self._kept[name] = Tenant(name, objectives, salt, budget)
        return tenant

    def hidden(self, untrusted: Collection[str]) -> frozenset[str]:
        """Returns the headers to hide from all other readers and to remove: `untrusted` headers, fairness ids, and keys."""
        read = [source for source in self._sources if source.header]
        kept = {source.header for source in read} - {source.header for source in read if not source.passed_on}
        return frozenset({*untrusted, *FAIRNESS_ID, *(source.header for source in read)} - kept)
