"""Data-parallel ranks behind one port: the gateway sends requests to this port, and a header tells the server the picked rank."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from epp.decision.decision import Decision, ProfileRun
from epp.plugin import plugin
from epp.plugins.profiles import OneProfile
from epp.request import Request
from epp.request.client_headers import RANK_HEADER


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Where the gateway sends requests.

    primary_port: The port to which the gateway sends requests; 0 keeps the port of the picked rank.
    """

    primary_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000


@plugin("data-parallel-profile-handler")
class DataParallel(OneProfile):
    """Runs the only profile, names the picked rank in a header, and sends the request to the primary port of the rank's host.

    All targets get the primary port. Slot and owner stay those of the picked rank, so load and cache are counted for it.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._port = params.primary_port

    def result(self, request: Request, runs: Mapping[str, ProfileRun | None]) -> Decision:
        decision = super().result(request, runs)
        decision.headers[RANK_HEADER] = decision.targets[0].address
        if self._port:
            decision.targets = tuple(rank.at_port(self._port) for rank in decision.targets)
        return decision
