"""Data-parallel ranks behind one port: the gateway sends to that port, a header tells the server which rank was picked."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from epp.decision import Decision, ProfileRun
from epp.errors import Cause, Refused
from epp.plugin import Profile, ProfileHandler, plugin
from epp.plugins.profiles._ranks import RANK_HEADER, at_port
from epp.request import Request


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The port that the gateway sends to; 0 leaves the picked rank's own."""

    primary_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000


@plugin("data-parallel-profile-handler")
class DataParallel(ProfileHandler):
    """Runs the one profile. The header names the best target as it was picked; all targets get the primary port.

    A rewritten target keeps slot and owner: what is in flight and what is cached is counted at the rank that was picked.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._port = params.primary_port

    def check(self, profiles: Sequence[str]) -> str | None:
        if len(profiles) == 1:
            return None
        return (
            f"data-parallel-profile-handler runs one profile, but {len(profiles)} are configured: {', '.join(profiles)}"
        )

    def pick(
        self, request: Request, profiles: Mapping[str, Profile], runs: Mapping[str, ProfileRun | None]
    ) -> Sequence[Profile]:
        return () if runs else tuple(profiles.values())

    def result(self, request: Request, runs: Mapping[str, ProfileRun | None]) -> Decision:
        ((name, run),) = runs.items()
        if run is None:
            raise Refused(Cause.NO_ENDPOINT_LEFT)
        ranks = run.targets
        decision = Decision([at_port(rank, self._port) for rank in ranks] if self._port else ranks, runs, primary=name)
        decision.headers[RANK_HEADER] = ranks[0].address
        return decision
