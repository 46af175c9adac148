"""Disaggregated serving chooses a decode target and, if the deciders want them, a prefill and an encode target for the same request.

    decode-first    decode ─▶ encode? prefill?     deciders see the decode run; plugins of the prefill profile see its target as peer
    prefill-first   prefill, encode? ─▶ decode     plugins of the decode profile see the prefill target as peer

A stage with `?` runs if its decider wants it; without a decider it never runs. In the order `prefill-first`, prefill has no decider and
always runs. The picker warns at start about settings that cannot have an effect.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from epp.decision.decision import Decision, ProfileRun
from epp.plugin import Decider, Need, Plugin, PreRequest, Profile, plugin
from epp.plugins.profiles import _stages as stages
from epp.plugins.profiles._disagg_parameters import Parameters
from epp.plugins.profiles._stages import DECODE, ENCODE, PEER, PREFILL, UNSERVED, Staged, address_stages, target
from epp.request import Request

DECODE_FIRST, PREFILL_FIRST = "decode-first", "prefill-first"
STAGE_ORDERS: Final = {
    "": DECODE_FIRST, "decodefirst": DECODE_FIRST, "decode": DECODE_FIRST,
    "prefillfirst": PREFILL_FIRST, "prefill": PREFILL_FIRST,
}  # fmt: skip
FLAT: Final = {  # deprecated parameter -> its replacement; if two have the same replacement, the first one is used
    "decodeProfile": "profiles.decode",
    "prefillProfile": "profiles.prefill",
    "encodeProfile": "profiles.encode",
    "prefillDeciderPluginName": "deciders.prefill",
    "deciderPluginName": "deciders.prefill",
    "encodeDeciderPluginName": "deciders.encode",
}


DECIDED: Final = stages.decisions("disagg_decision_total")


@plugin("disagg-profile-handler")
class Disaggregated(Staged, PreRequest):
    """Runs the decode profile, and the encode and prefill profiles if their deciders want them. The targets are the decode targets."""

    Params = Parameters
    renamed = FLAT
    decided = DECIDED
    metrics = (DECIDED, UNSERVED)
    produces = (PEER,)

    def __init__(self, name: str, params: Parameters) -> None:
        given = _settings(params)
        super().__init__(
            name,
            params,
            decode=given.get("profiles.decode", ("", DECODE))[1],
            prefill=given.get("profiles.prefill", ("", PREFILL))[1],
            encode=given.get("profiles.encode", ("", ENCODE))[1],
            on_no_prefill=params.on_no_prefill,
        )
        self.deprecated = {path: new for new, (path, _) in given.items() if path != new}
        deciders = {stage: given[path] for stage in (PREFILL, ENCODE) if (path := f"deciders.{stage}") in given}
        self.needs = {stage: Need(path, value, Decider) for stage, (path, value) in deciders.items()}
        self.order = _order(params.stage_order)
        if self.order == PREFILL_FIRST and PREFILL in self.needs:
            raise ValueError(f"{self.needs[PREFILL].parameter}: with stageOrder {PREFILL_FIRST} prefill always runs; remove the decider")
        self._prefill_decider: Decider | None = None
        self._encode_decider: Decider | None = None

    def resolve(self, found: Mapping[str, Plugin]) -> None:
        prefill, encode = found.get(PREFILL), found.get(ENCODE)
        assert prefill is None or isinstance(prefill, Decider)
        assert encode is None or isinstance(encode, Decider)
        self._prefill_decider, self._encode_decider = prefill, encode

    def check(self, profiles: Sequence[str]) -> str | None:
        configured = f"configured profiles: {', '.join(profiles)}"
        if self.decode not in profiles:
            return f"{self.name} decodes with the profile '{self.decode}' (profiles.decode), but it does not exist; {configured}"
        if len({self.decode, self.prefill, self.encode}) < 3:
            return f"{self.name} needs three different profiles for decode, prefill and encode; {configured}"
        return None

    def reaches(self, profiles: Sequence[str]) -> Collection[str]:
        return [name for name in profiles if name == self.decode or name in self._stages()]

    def idle(self, profiles: Sequence[str]) -> Sequence[str]:
        return [
            f"{self.name} has no {stage} stage: there is no profile '{profile}' (profiles.{stage})"
            for profile, stage in self._stages().items()
            if profile not in profiles
        ]

    def _stages(self) -> Mapping[str, str]:
        """Returns encode or prefill profile -> its stage, without stages that can never be wanted."""
        always = PREFILL if self.order == PREFILL_FIRST else ""
        stages_of = {self.prefill: PREFILL, self.encode: ENCODE}
        return {profile: stage for profile, stage in stages_of.items() if stage in self.needs or stage == always}

    def pick(self, request: Request, profiles: Mapping[str, Profile], runs: Mapping[str, ProfileRun | None]) -> Sequence[Profile]:
        if self.order == PREFILL_FIRST:
            return self._prefill_first(request, profiles, runs)
        if not runs:
            return (profiles[self.decode],)
        decode = runs[self.decode]
        if decode is None or len(runs) > 1:
            return ()
        wanted = []
        if self._wants_encode(request, profiles, decode):
            wanted.append(profiles[self.encode])
        decider = self._prefill_decider
        if decider is not None and self.prefill in profiles and stages.wanted(decider, request, decode):
            request.give(self.prefill, PEER, target(decode))
            wanted.append(profiles[self.prefill])
        return wanted

    def _prefill_first(self, request: Request, profiles: Mapping[str, Profile], runs: Mapping[str, ProfileRun | None]) -> Sequence[Profile]:
        if self.decode in runs:
            return ()
        if not runs:
            wanted = [profiles[self.prefill]] if self.prefill in profiles else []
            if self._wants_encode(request, profiles, None):
                wanted.append(profiles[self.encode])
            return wanted or (profiles[self.decode],)
        prefill = runs.get(self.prefill)
        if prefill is not None:
            request.give(self.decode, PEER, target(prefill))
        elif self.refuses and self.prefill in runs:
            return ()
        return (profiles[self.decode],)

    def _wants_encode(self, request: Request, profiles: Mapping[str, Profile], decode: ProfileRun | None) -> bool:
        decider = self._encode_decider
        return decider is not None and self.encode in profiles and stages.wanted(decider, request, decode)

    def before_send(self, request: Request, decision: Decision) -> None:
        address_stages(decision, self.prefill, self.encode)


def _settings(params: Parameters) -> dict[str, tuple[str, str]]:
    """Returns nested path of each configured profile and decider -> (path as written, value).

    Raises ValueError if the configuration uses both nested and flat parameters.
    """
    wire = {field.encode_name: field.name for field in msgspec.structs.fields(params)}
    flat = {old: value for old in FLAT if (value := getattr(params, wire[old]))}
    if flat and (params.profiles is not None or params.deciders is not None):
        old = next(iter(flat))
        raise ValueError(
            f"{old}: the deprecated flat parameters and the nested profiles and deciders exclude each other; write {FLAT[old]}"
        )
    configured: dict[str, tuple[str, str]] = {}
    for old, value in flat.items():
        configured.setdefault(FLAT[old], (old, value))
    for group, struct in (("profiles", params.profiles), ("deciders", params.deciders)):
        for stage, value in (msgspec.structs.asdict(struct) if struct is not None else {}).items():
            if value:
                configured[f"{group}.{stage}"] = (f"{group}.{stage}", value)
    return configured


def _order(text: str) -> str:
    order = STAGE_ORDERS.get(text.replace("-", "").replace("_", "").lower())
    if order is None:
        raise ValueError(f"stageOrder: '{text[:64]}' is neither {DECODE_FIRST} nor {PREFILL_FIRST}")
    return order
