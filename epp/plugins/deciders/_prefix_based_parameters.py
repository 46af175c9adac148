"""The parameters of `epp.plugins.deciders.prefix_based`. Not compiled: msgspec reads annotations at run time."""

from typing import Annotated

import msgspec


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """When prefill runs on another server. Names and defaults are those of the reference picker.

    non_cached_tokens: Prefill runs elsewhere if at least this many tokens of the prompt are not cached; 0 means never.
    prompt_tokens: Prefill runs elsewhere only for prompts with at least this many tokens; 0 means no minimum.
    prefix_match_info_producer_name: The producer of the prefix matches to read. Empty: the only producer that is listed, or else
        `approx-prefix-cache-producer`. The reference picker lacks this parameter.
    """

    non_cached_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    prefix_match_info_producer_name: str = ""
