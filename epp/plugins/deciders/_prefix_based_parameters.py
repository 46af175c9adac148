"""The parameters of `epp.plugins.deciders.prefix_based`. Not compiled: msgspec reads annotations at run time."""

from typing import Annotated

import msgspec


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """As in the reference picker.

    non_cached_tokens: The least tokens of a prompt that are not cached for which prefill runs elsewhere; 0 means never.
    prompt_tokens: The least length of a prompt; 0 means no minimum.
    prefix_match_info_producer_name: The producer of the prefix matches to read. Empty: the only one that is listed, or the approximate
        one. An extension.
    """

    non_cached_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    prefix_match_info_producer_name: str = ""
