"""Parameters of `learned_latency`, apart from it: the module is compiled, and msgspec structs must not be."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Percentile = Annotated[int, msgspec.Meta(ge=1, le=99)]


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Where the model gets its features from.

    prefix_match_info_producer_name: The producer of the prefix matches to read.
    """

    prefix_match_info_producer_name: str = ""


class ObserverParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which requests count. As in the reference picker, except that the model needs no windows: it forgets by itself.

    min_requests: With fewer requests, an endpoint is cold: `latency-observation-scorer` explores it.
    prefix_match_info_producer_name: The producer of the prefix matches to read. Not in the reference picker.
    interval_duration: Accepted, without effect: the model is published when it has changed, up to ten times a second.
    max_observation_age: Accepted, without effect.
    max_requests: Accepted, without effect.
    low_percentile: Accepted, without effect.
    high_percentile: Accepted, without effect.
    typical_percentile: Accepted, without effect: another name of highPercentile.
    window_size: Accepted, without effect.
    bucket_duration: Accepted, without effect.
    bucket_history_size: Accepted, without effect.
    in_flight_load_producer_name: Accepted, without effect: the picker counts the load in flight itself.
    """

    min_requests: Count = 10
    prefix_match_info_producer_name: str = ""
    interval_duration: str = "1s"
    max_observation_age: str = "3m"
    max_requests: Count = 100
    low_percentile: Percentile = 25
    high_percentile: Percentile = 50
    typical_percentile: Percentile = 50
    window_size: Count = 5000
    bucket_duration: str = "1m"
    bucket_history_size: Annotated[int, msgspec.Meta(ge=2, le=1_000_000)] = 1000
    in_flight_load_producer_name: str = ""
