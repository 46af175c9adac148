"""The parameters of `epp.plugins.profiles.disagg`. This module is not compiled, because msgspec reads annotations at run time."""

import msgspec

from epp.plugins.profiles._stages import OnNoPrefill


class StageProfiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scheduling profiles of the stages; empty means the default name.

    decode: The profile of the decode stage.
    prefill: The profile of the prefill stage.
    encode: The profile of the encode stage.
    """

    decode: str = ""
    prefill: str = ""
    encode: str = ""


class StageDeciders(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Deciders of the stages; empty means no decider.

    prefill: The decider of the prefill stage.
    encode: The decider of the encode stage.
    """

    prefill: str = ""
    encode: str = ""


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The profiles and deciders of the stages, as in the reference picker: either nested, or by the deprecated flat names.

    profiles: Scheduling profiles of the stages.
    deciders: Plugins that decide whether a request needs a stage.
    stage_order: The order in which stages are scheduled. Case, `-` and `_` are ignored.
    on_no_prefill: What happens to a request whose prefill stage is wanted but finds no endpoint. The reference picker lacks this parameter.
    decode_profile: Deprecated: use profiles.decode.
    prefill_profile: Deprecated: use profiles.prefill.
    encode_profile: Deprecated: use profiles.encode.
    prefill_decider_plugin_name: Deprecated: use deciders.prefill.
    decider_plugin_name: Deprecated: use deciders.prefill.
    encode_decider_plugin_name: Deprecated: use deciders.encode.
    """

    profiles: StageProfiles | None = None
    deciders: StageDeciders | None = None
    stage_order: str = ""
    on_no_prefill: OnNoPrefill = "decode-only"
    decode_profile: str = ""
    prefill_profile: str = ""
    encode_profile: str = ""
    prefill_decider_plugin_name: str = ""
    decider_plugin_name: str = ""
    encode_decider_plugin_name: str = ""
