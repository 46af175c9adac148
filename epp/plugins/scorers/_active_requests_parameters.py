"""The parameters of `epp.plugins.scorers.active_requests`. Not compiled: msgspec reads annotations at run time."""

import msgspec


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
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
