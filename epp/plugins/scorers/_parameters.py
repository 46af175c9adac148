"""The parameters of the compiled scorers. Not compiled: msgspec reads annotations at run time."""

from typing import Annotated, Final

import msgspec

from epp.points.tuning import tuned

QUEUE_TOKENS: Final = 4_194_304  # 128 requests of 32,768 tokens


class ActiveRequestsParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Limits of the score.

    idle_threshold: An endpoint with at most this many requests is idle; a value below 0 means 0.
    max_busy_score: The highest possible score of a busy endpoint; a value outside 0 to 1 means 1.
    in_flight_load_producer_name: A listed `inflight-load-producer`. The name changes nothing: the picker counts the load for all plugins.
    request_timeout: Accepted, without effect: a request is in flight until its stream ends.
    """

    idle_threshold: int = 0
    max_busy_score: float | None = 1.0
    in_flight_load_producer_name: str = ""
    request_timeout: str = ""


class LearnedLatencyParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Whose predictions count, and how often other endpoints are tried.

    exploration_rate: The part of the requests for which all endpoints count as equal whose first token is expected within 1.5 times the
    shortest time.
    learned_latency_producer_name: The producer of the predictions to read.
    """

    exploration_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.005
    learned_latency_producer_name: str = ""


class PrefixCacheParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What a match is worth.

    prefix_match_info_producer_name: The producer of the prefix matches to read.
    match_length_weight: The weight of the match's absolute length, against its share of the prompt.
    match_length_scale_tokens: The length from which on a match has the full score for its length.
    """

    prefix_match_info_producer_name: str = ""
    match_length_weight: Annotated[float, msgspec.Meta(ge=0, le=1), tuned(0, 1)] = 0.0
    match_length_scale_tokens: Annotated[int, msgspec.Meta(ge=0), tuned(256, 65_536)] = 8192


class TokenLoadParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What counts as full.

    queue_threshold_tokens: The load that scores 0; 0 or less means the default.
    in_flight_load_producer_name: A listed `inflight-load-producer`. The name changes nothing: the picker counts the load for all plugins.
    """

    queue_threshold_tokens: Annotated[int, tuned(4_096, QUEUE_TOKENS)] = QUEUE_TOKENS
    in_flight_load_producer_name: str = ""
