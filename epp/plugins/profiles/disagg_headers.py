"""The headers of disaggregated serving as a plugin of their own, for configurations written before the handler set them."""

import msgspec

from epp.decision import Decision
from epp.plugin import PreRequest, plugin
from epp.plugins.profiles._stages import ENCODE, PREFILL, address_stages
from epp.request import Request


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """As in the field."""

    prefill_profile: str = PREFILL
    encode_profile: str = ENCODE


@plugin("disagg-headers-handler", "prefill-header-handler")
class DisaggregationHeaders(PreRequest):
    """Deprecated. Needed beside pd-profile-handler alone; disagg-profile-handler does the same by itself."""

    Params = Parameters
    params: Parameters

    def before_send(self, request: Request, decision: Decision) -> None:
        address_stages(decision, self.params.prefill_profile, self.params.encode_profile)
