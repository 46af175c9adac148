"""The endpoints that the request's header names, for tests of gateways. Never for real traffic: the client chooses the server."""

from typing import Final

import numpy as np

from epp.candidates import Candidates, Mask, Scores
from epp.plugin import Filter, Profile, Scorer, plugin
from epp.request import Request

SELECTION: Final = "test-epp-endpoint-selection"


@plugin("header-based-testing-filter")
class HeaderSelection(Filter, Scorer):
    """Keeps the endpoints that the header `test-epp-endpoint-selection` lists, `ip` or `ip:port`, and prefers them in that order.

    Of several endpoints of one IP only the first that is listed is kept, and an IP alone means the last of them. Without the header
    none is kept.
    """

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        mask: Mask = np.zeros(len(candidates), dtype=bool)
        mask[self._rows(request, candidates)] = True
        return mask

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        scores = candidates.zeros()
        for place, row in enumerate(self._rows(request, candidates)):
            scores[row] = 1.0 / (1 + place)
        return scores

    def _rows(self, request: Request, candidates: Candidates) -> list[int]:
        endpoints = candidates.endpoints
        rows: dict[tuple[str, int | None], int] = {}
        for row, endpoint in enumerate(endpoints):
            rows[endpoint.host, None] = rows[endpoint.host, endpoint.port] = row
        found: dict[str, int] = {}
        for entry in request.headers.get(SELECTION, "").split(","):
            host, port = _parted(entry.strip())
            named = rows.get((host, port)) if host else None
            if named is not None:
                found.setdefault(host, named)
        return list(found.values())


def _parted(entry: str) -> tuple[str, int | None]:
    """(host, port), as far as an entry says them; an IPv6 address with a port has brackets."""
    if entry.startswith("["):
        host, _, rest = entry[1:].partition("]")
        port = rest.removeprefix(":")
    elif entry.count(":") == 1:
        host, _, port = entry.partition(":")
    else:
        host, port = entry, ""
    if not port:
        return host, None
    return (host, int(port)) if port.isdecimal() and len(port) <= 5 else ("", None)
