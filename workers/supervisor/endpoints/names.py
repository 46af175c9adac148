"""Resolves the DNS names of endpoints. If a name cannot be resolved, its last known addresses stay."""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection, Iterable

ADDRESSES_MAX = 1024  # limit per name
RESOLVE_S_MAX = 5.0
RESOLVES_AT_ONCE = 4


def address_of(text: str) -> str | None:
    """Returns the canonical form of an IP address. Returns None if the text is no IP address or has a zone ("%")."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return None if "%" in text else str(address)


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
            if name not in self._failing:
                self._failing.add(name)
                kept = len(self.known(name))
                why = str(failure) or f"no answer within {RESOLVE_S_MAX:g} s"
                self._report("name cannot be resolved", name=name, reason=why, addresses_kept=kept)
            return
        self._failing.discard(name)
        four = {str(entry[4][0]) for entry in found if entry[0] == socket.AF_INET}
        six = {str(entry[4][0]) for entry in found if entry[0] == socket.AF_INET6}
        addresses = sorted(address for address in four or six if address_of(address))
        if addresses:
            self._known[name] = tuple(addresses[:ADDRESSES_MAX])
