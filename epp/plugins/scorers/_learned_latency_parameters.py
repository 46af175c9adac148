"""Parameters of `learned_latency`, apart from it: the module is compiled, and msgspec structs must not be."""

from typing import Annotated

import msgspec


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Whose predictions count, and how often other endpoints are tried.

    exploration_rate: The part of the requests for which all endpoints count as equal whose first token is expected within 1.5 times the
    shortest time.
    learned_latency_producer_name: The producer of the predictions to read.
    """

    exploration_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.005
    learned_latency_producer_name: str = ""
