"""Plugins for the conformance tests of gateways: the test selects the endpoint, and learns which endpoint served."""

from typing import Final

import numpy as np

from epp.candidates import Candidates, Mask, Scores
from epp.decision.decision import SERVED, Decision, Response
from epp.plugin import Filter, Profile, ResponseReceived, Scorer, plugin
from epp.request import Request

SELECTION: Final = "test-epp-endpoint-selection"


@plugin("header-based-testing-filter")
class HeaderSelection(Filter, Scorer):
    """Keeps the endpoints that the header `test-epp-endpoint-selection` lists, and scores them in that order. For tests only.

    The header lists `ip` or `ip:port`, separated by commas. An entry without a port means the last endpoint with that IP. If several
    entries name endpoints with the same IP, only the first of these entries has an effect. Without the header no endpoint is kept.
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
        rows_by_host: dict[str, int] = {}
        for entry in request.headers.get(SELECTION, "").split(","):
            host, port = _parted(entry.strip())
            row_named = rows.get((host, port)) if host else None
            if row_named is not None:
                rows_by_host.setdefault(host, row_named)
        return list(rows_by_host.values())


def _parted(entry: str) -> tuple[str, int | None]:
    """Splits an entry into host and port, or None without a port. An invalid port gives ("", None). IPv6 with a port needs brackets."""
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


RESULT: Final = "x-conformance-test-served-endpoint"


@plugin("destination-endpoint-served-verifier")
class ServedVerifier(ResponseReceived):
    """Copies the served endpoint from the gateway's metadata into the header `x-conformance-test-served-endpoint`. For tests only."""

    def response_received(self, request: Request, decision: Decision, response: Response) -> None:
        gateway = response.gateway
        if gateway is None:
            text = "fail: missing envoy lb metadata"
        else:
            served = gateway.get(SERVED)
            text = served if isinstance(served, str) else "fail: missing destination endpoint served metadata"
        response.set_headers[RESULT] = text
