"""Resolves the DNS names of endpoints. If a name cannot be resolved, its last known addresses stay."""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection, Iterable

ADDRESSES_MAX = 1024  # limit per name
RESOLVE_S_MAX = 5.0
RESOLVES_AT_ONCE = 4
SHOWN_MAX = 4  # addresses in a report


def address_of(text: str) -> str | None:
    """Returns the canonical form of an IP address. Returns None if the text is no IP address or has a zone ("%")."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return None if "%" in text else str(address)


def reaches_server(address: str) -> bool:
    """Returns whether a server can have this IP address. A connection to 0.0.0.0 would reach the picker's own machine."""
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_unspecified or parsed.is_multicast)


def is_address(host: str) -> bool:
    """Returns whether `host` is an IP address and not a DNS name. `discovery` has refused names whose last label is a number."""
    return ":" in host or host.rpartition(".")[2].isdigit()


class Names:
    """Resolves DNS names and keeps their addresses. If a name cannot be resolved, its last known addresses stay."""

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report
        self._known: dict[str, tuple[str, ...]] = {}
        self._failing: set[str] = set()

    def known(self, name: str) -> tuple[str, ...]:
        """Returns the last known addresses of a name; () if it was never resolved."""
        return self._known.get(name, ())

    def assume(self, name: str, addresses: Iterable[str]) -> None:
        """Uses `addresses`, which a predecessor has found, until the name is resolved."""
        if assumed := tuple(sorted(addresses)):
            self._known.setdefault(name, assumed)

    async def resolve(self, names: Collection[str]) -> bool:
        """Resolves all names. Returns whether an address has changed."""
        before = dict(self._known)
        gate = asyncio.Semaphore(RESOLVES_AT_ONCE)

        async def one(name: str) -> None:
            async with gate:
                await self._look_up(name)

        await asyncio.gather(*map(one, names))
        return self._known != before

    def keep(self, names: Collection[str]) -> None:
        """Forgets all names but these."""
        for gone in self._known.keys() - set(names):
            del self._known[gone]
        self._failing &= set(names)

    async def _look_up(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(RESOLVE_S_MAX):
                found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as failure:  # TimeoutError is an OSError
            self._failed(name, str(failure) or f"no answer within {RESOLVE_S_MAX:g} s")
            return
        told = {str(entry[4][0]) for entry in found}
        usable = {address for address in told if address_of(address) and reaches_server(address)}
        if not usable:
            self._failed(name, f"no server can have its addresses: {', '.join(sorted(told)[:SHOWN_MAX]) or 'it has none'}")
            return
        self._failing.discard(name)
        four = {address for address in usable if ":" not in address}
        self._known[name] = tuple(sorted(four or usable)[:ADDRESSES_MAX])

    def _failed(self, name: str, why: str) -> None:
        """Reports a name that cannot be resolved, once until it can be again. Its last addresses stay."""
        if name not in self._failing:
            self._failing.add(name)
            self._report("name cannot be resolved", name=name, reason=why, addresses_kept=len(self.known(name)))
