"""Sets the headers of disaggregated serving in a separate plugin, for old configurations whose profile handler does not set them."""

import msgspec

from epp.decision.decision import Decision
from epp.plugin import PreRequest, plugin
from epp.plugins.profiles._stages import ENCODE, PREFILL, address_stages
from epp.request import Request


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The profiles whose targets go into headers, as in the reference picker.

    prefill_profile: The name of the prefill profile.
    encode_profile: The name of the encode profile.
    """

    prefill_profile: str = PREFILL
    encode_profile: str = ENCODE


@plugin("disagg-headers-handler", "prefill-header-handler")
class DisaggregationHeaders(PreRequest):
    """Sets the headers of disaggregated serving. Deprecated: only pd-profile-handler needs it."""

    Params = Parameters
    params: Parameters

    def before_send(self, request: Request, decision: Decision) -> None:
        address_stages(decision, self.params.prefill_profile, self.params.encode_profile)
