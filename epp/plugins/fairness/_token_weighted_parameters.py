"""The parameters of `epp.plugins.fairness.token_weighted`. Not compiled: msgspec reads annotations at run time."""

from typing import Annotated

import msgspec

Weight = Annotated[float, msgspec.Meta(ge=0.001, le=1000)]


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Shares of flows.

    weights: The share of each flow by its fairness id.
    default_weight: The share of all other flows.
    quantum_tokens: How far behind a flow may start when it becomes non-empty, at weight 1.
    expected_output_tokens: The estimate of an answer before the first one.
    prefix_match_info_producer_name: The producer of the prefix matches to read. Empty: the one by which endpoints are chosen.
    """

    weights: dict[str, Weight] = {}
    default_weight: Weight = 1.0
    quantum_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 512
    expected_output_tokens: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 256
    prefix_match_info_producer_name: str = ""
