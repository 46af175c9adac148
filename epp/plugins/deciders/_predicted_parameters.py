"""The parameters of `epp.plugins.deciders.predicted`. Not compiled: msgspec reads annotations at run time."""

from typing import Annotated

import msgspec


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What disaggregation has to gain. This type is not in the reference picker.

    learned_latency_producer_name: The producer of the predictions to read.
    transfer_ms_per_thousand_tokens: How long the decode server takes to load 1,000 tokens that a prefill server has computed.
    min_gain_ms: The least time by which the first token has to come sooner.
    non_cached_tokens: While the model is not used, prefill runs elsewhere if the decode server has to compute at least this many tokens.
    """

    learned_latency_producer_name: str = ""
    transfer_ms_per_thousand_tokens: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    min_gain_ms: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    non_cached_tokens: Annotated[int, msgspec.Meta(ge=1)] = 256
