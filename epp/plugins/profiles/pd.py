"""Schedules prefill and decode for configurations that are older than disagg-profile-handler. Deprecated."""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

import msgspec

from epp.decision.decision import Decision, ProfileRun
from epp.plugin import Decider, Need, Plugin, Profile, plugin
from epp.plugins.profiles import _stages as stages
from epp.plugins.profiles._stages import DECODE, PREFILL, UNSERVED, OnNoPrefill, Staged, target, wanted
from epp.request import Request
from epp.request.client_headers import RANK_HEADER

DEFAULT_DECIDER = "prefix-based-pd-decider"


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Profiles, decider and port, as in the reference picker.

    decode_profile: The name of the decode profile.
    prefill_profile: The name of the prefill profile.
    decider_plugin_name: The plugin that decides whether a request needs prefill.
    primary_port: The port to which the gateway sends requests; a header then names the picked endpoint. 0 keeps the port of the endpoint.
    prefix_plugin_name: Accepted, without effect: the decider determines the prefix matches that it reads.
    prefix_plugin_type: Accepted, without effect: the decider determines the prefix matches that it reads.
    prefix_match_info_producer_name: Accepted, without effect: the decider determines the prefix matches that it reads.
    on_no_prefill: What happens to a request whose prefill stage is wanted but finds no endpoint. The reference picker lacks this parameter.
    """

    decode_profile: str = DECODE
    prefill_profile: str = PREFILL
    decider_plugin_name: str = DEFAULT_DECIDER
    primary_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    prefix_plugin_name: str = ""
    prefix_plugin_type: str = ""
    prefix_match_info_producer_name: str = ""
    on_no_prefill: OnNoPrefill = "decode-only"


@plugin("pd-profile-handler")
class PrefillDecode(Staged):
    """Runs decode, then prefill if the decider wants it. Deprecated: use disagg-profile-handler.

    Use it with disagg-headers-handler, which tells the sidecar the prefill target. With `primaryPort` the request goes to that port of the
    decode target's host, and a header names the target with its own port.
    """

    Params = Parameters
    decided = stages.decisions("pd_decision_total")
    metrics = (decided, UNSERVED)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(
            name, params, decode=params.decode_profile, prefill=params.prefill_profile, encode="", on_no_prefill=params.on_no_prefill
        )
        if not params.decider_plugin_name:
            raise ValueError("deciderPluginName: is empty; name a decider")
        self.needs = {PREFILL: Need("deciderPluginName", params.decider_plugin_name, Decider)}
        self._decider: Decider

    def resolve(self, found: Mapping[str, Plugin]) -> None:
        decider = found[PREFILL]
        assert isinstance(decider, Decider)
        self._decider = decider

    def check(self, profiles: Sequence[str]) -> str | None:
        missing = [name for name in (self.decode, self.prefill) if name not in profiles]
        if missing or self.decode == self.prefill:
            which = f"there is no '{missing[0]}'" if missing else "both are the same"
            return f"{self.name} needs a decode and a prefill profile, but {which}; configured profiles: {', '.join(profiles)}"
        return None

    def reaches(self, profiles: Sequence[str]) -> Collection[str]:
        return [name for name in profiles if name in (self.decode, self.prefill)]

    def pick(self, request: Request, profiles: Mapping[str, Profile], runs: Mapping[str, ProfileRun | None]) -> Sequence[Profile]:
        if not runs:
            return (profiles[self.decode],)
        decode = runs[self.decode]
        if decode is None or len(runs) > 1 or not wanted(self._decider, request, decode):
            return ()
        return (profiles[self.prefill],)

    def result(self, request: Request, runs: Mapping[str, ProfileRun | None]) -> Decision:
        decision = super().result(request, runs)
        port: int = self.params.primary_port
        if port:
            decode = runs[self.decode]
            assert decode is not None
            decision.headers[RANK_HEADER] = target(decode).address
            decision.targets = tuple(endpoint.at_port(port) for endpoint in decision.targets)
        return decision
