"""The parameters of the compiled deciders. Not compiled: msgspec reads annotations at run time."""

from typing import Annotated

import msgspec


class PrefixBasedParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """When prefill runs on another server. Names and defaults are those of the reference picker.

    non_cached_tokens: Prefill runs elsewhere if at least this many tokens of the prompt are not cached; 0 means never.
    prompt_tokens: Prefill runs elsewhere only for prompts with at least this many tokens; 0 means no minimum.
    prefix_match_info_producer_name: The producer of the prefix matches to read. Empty: the only producer that is listed, or else
        `approx-prefix-cache-producer`. The reference picker lacks this parameter.
    """

    non_cached_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    prefix_match_info_producer_name: str = ""


class PredictedParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
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
