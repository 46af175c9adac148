"""The parameters of `epp.plugins.fairness.token_weighted`. Not compiled: msgspec reads annotations at run time."""

from typing import Annotated

import msgspec

Weight = Annotated[float, msgspec.Meta(ge=0.001, le=1000)]


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Shares of flows.

    weights: Fairness id -> the weight of its flow. Flows get tokens in proportion to their weights.
    default_weight: The weight of each other flow.
    quantum_tokens: How many tokens (at weight 1) a flow that was empty may get ahead of the flows that wait.
    expected_output_tokens: The estimated tokens of an answer as long as there was no answer.
    prefix_match_info_producer_name: The producer of the prefix matches to read. Empty: the one by which endpoints are chosen.
    """

    weights: dict[str, Weight] = {}
    default_weight: Weight = 1.0
    quantum_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 512
    expected_output_tokens: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 256
    prefix_match_info_producer_name: str = ""
