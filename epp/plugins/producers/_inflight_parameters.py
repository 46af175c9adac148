"""The parameters of `epp.plugins.producers.inflight`. Not compiled: msgspec reads annotations at run time."""

from typing import Annotated, Final

import msgspec

COUNTS_WITH: Final = dict.fromkeys(("outputRatio", "maxEstimatedOutputTokens"), ("addEstimatedOutputTokens", (True,)))


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Says how many tokens a request adds to the load of its endpoint.

    add_estimated_output_tokens: Count the tokens of the answer, too.
    output_ratio: Tokens of an answer per token of its prompt.
    max_estimated_output_tokens: The most tokens that are counted for an answer. Default: no limit.
    prefix_match_info_producer_name: The producer of the prefix matches to read.
    sync_cross_replica_state: Accepted, without effect.
    """

    add_estimated_output_tokens: bool = False
    output_ratio: Annotated[float, msgspec.Meta(ge=0)] = 1.5
    max_estimated_output_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    prefix_match_info_producer_name: str = ""
    sync_cross_replica_state: bool = True
