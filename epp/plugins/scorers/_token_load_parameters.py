"""The parameters of `token-load-scorer`. Not compiled: msgspec reads annotations at run time."""

from typing import Annotated, Final

import msgspec

from epp.points.tuning import tuned

QUEUE_TOKENS: Final = 4_194_304  # 128 requests of 32,768 tokens


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What counts as full.

    queue_threshold_tokens: The load that scores 0; 0 or less means the default.
    in_flight_load_producer_name: A listed `inflight-load-producer`. The name changes nothing: the picker counts the load for all plugins.
    """

    queue_threshold_tokens: Annotated[int, tuned(4_096, QUEUE_TOKENS)] = QUEUE_TOKENS
    in_flight_load_producer_name: str = ""
