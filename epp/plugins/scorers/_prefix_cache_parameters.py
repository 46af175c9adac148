"""The parameters of `prefix-cache-scorer`. Not compiled: msgspec reads annotations at run time."""

from typing import Annotated

import msgspec

from epp.points.tuning import tuned


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What a match is worth.

    prefix_match_info_producer_name: The producer of the prefix matches to read.
    match_length_weight: The weight of the match's absolute length, against its share of the prompt.
    match_length_scale_tokens: The length from which on a match has the full score for its length.
    """

    prefix_match_info_producer_name: str = ""
    match_length_weight: Annotated[float, msgspec.Meta(ge=0, le=1), tuned(0, 1)] = 0.0
    match_length_scale_tokens: Annotated[int, msgspec.Meta(ge=0), tuned(256, 65_536)] = 8192
