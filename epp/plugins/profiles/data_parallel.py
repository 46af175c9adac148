"""Data-parallel ranks behind one port: the gateway sends to that port, a header tells the server which rank was picked."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from epp.decision import Decision, ProfileRun
from epp.plugin import plugin
from epp.plugins.profiles import OneProfile
from epp.plugins.profiles._ranks import RANK_HEADER, at_port
from epp.request import Request


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The port that the gateway sends to; 0 leaves the picked rank's own."""

    primary_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000


@plugin("data-parallel-profile-handler")
class DataParallel(OneProfile):
    """Runs the one profile. The header names the best target as it was picked; all targets get the primary port.

    A rewritten target keeps slot and owner: what is in flight and what is cached is counted at the rank that was picked.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._port = params.primary_port

    def result(self, request: Request, runs: Mapping[str, ProfileRun | None]) -> Decision:
        decision = super().result(request, runs)
        decision.headers[RANK_HEADER] = decision.targets[0].address
        if self._port:
            decision.targets = tuple(at_port(rank, self._port) for rank in decision.targets)
        return decision
