"""The parameters of compiled plugins, in one module that is not compiled: msgspec reads annotations at run time."""

from typing import Annotated, Final, Literal

import msgspec

from epp.points.parameters import tuned


class PrefixBasedParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """When prefill runs on another server. Names and defaults are those of the reference picker.

    non_cached_tokens: Prefill runs on another server if at least this many tokens of the prompt are not cached; 0 means never.
    prompt_tokens: Prefill runs on another server only for prompts with at least this many tokens; 0 means no minimum.
    prefix_match_info_producer_name: The producer of the prefix matches to read. Empty: the only producer that is listed, or else
        `approx-prefix-cache-producer`. The reference picker lacks this parameter.
    """

    non_cached_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    prefix_match_info_producer_name: str = ""


class PredictedParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How much time disaggregation must save. The reference picker does not have this type.

    learned_latency_producer_name: The producer of the predictions to read.
    transfer_ms_per_thousand_tokens: How long the decode server takes to load 1,000 tokens that a prefill server has computed.
    min_gain_ms: The least time by which the first token has to come sooner.
    non_cached_tokens: Without the model, prefill runs on another server if the decode server has to compute at least this many tokens.
    """

    learned_latency_producer_name: str = ""
    transfer_ms_per_thousand_tokens: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    min_gain_ms: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    non_cached_tokens: Annotated[int, msgspec.Meta(ge=1)] = 256


Weight = Annotated[float, msgspec.Meta(ge=0.001, le=1000)]


class TokenWeightedParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Shares of flows.

    weights: Fairness id -> the weight of the flow. Flows get tokens in proportion to their weights.
    default_weight: The weight of all other flows.
    quantum_tokens: How many tokens (at weight 1) a flow that was empty may get ahead of the flows that wait.
    expected_output_tokens: The estimated tokens of an answer before the first answer.
    prefix_match_info_producer_name: The producer of the prefix matches to read. Empty: the producer by which endpoints are chosen.
    """

    weights: dict[str, Weight] = {}
    default_weight: Weight = 1.0
    quantum_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 512
    expected_output_tokens: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 256
    prefix_match_info_producer_name: str = ""


INFLIGHT_COUNTS_WITH: Final = dict.fromkeys(("outputRatio", "maxEstimatedOutputTokens"), ("addEstimatedOutputTokens", (True,)))
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Percentile = Annotated[int, msgspec.Meta(ge=1, le=99)]
BLOCK_TOKENS_MAX: Final = 1 << 20  # if blocks were larger, no prompt would have a whole block
BLOCK_TOKENS_DEFAULT: Final = 16  # the reference picker's default; this picker uses BLOCK_TOKENS_MIN instead
LRU_CAPACITY: Final = 31250


class InflightParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Says how many tokens a request adds to the load of its endpoint.

    add_estimated_output_tokens: Count the tokens of the answer, too.
    output_ratio: Tokens of an answer per token of its prompt.
    max_estimated_output_tokens: The most tokens that are assumed for an answer. Default: no limit.
    prefix_match_info_producer_name: The producer of the prefix matches to read.
    sync_cross_replica_state: Accepted, without effect.
    """

    add_estimated_output_tokens: bool = False
    output_ratio: Annotated[float, msgspec.Meta(ge=0)] = 1.5
    max_estimated_output_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    prefix_match_info_producer_name: str = ""
    sync_cross_replica_state: bool = True


class LearnedLatencyParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Where the model gets its features from.

    prefix_match_info_producer_name: The producer of the prefix matches to read.
    """

    prefix_match_info_producer_name: str = ""


class HubObserverParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which requests are used, and for how long. Names and defaults are those of the reference picker.

    interval_duration: The time between two computations of the percentiles.
    max_observation_age: How old a recent request may be.
    max_requests: How many of the newest requests are recent; at most windowSize.
    min_requests: With fewer requests, an endpoint is cold. With fewer recent requests, its points of low and typical load are ignored.
    low_percentile: The percentile of the point of low load; below typicalPercentile.
    typical_percentile: The percentile of the point of typical load.
    window_size: How many requests are remembered per endpoint.
    bucket_duration: How long a bucket is. At its end, the 10th percentile of its TTFTs goes into a history; best at most maxObservationAge.
    bucket_history_size: How many percentiles of buckets the history holds. A full history drops the largest.
    in_flight_load_producer_name: Accepted, without effect: the picker counts the load in flight itself.
    """

    interval_duration: str = "1s"
    max_observation_age: str = "3m"
    max_requests: Count = 100
    min_requests: Count = 10
    low_percentile: Percentile = 25
    typical_percentile: Percentile = 50
    window_size: Count = 5000
    bucket_duration: str = "1m"
    bucket_history_size: Annotated[int, msgspec.Meta(ge=2, le=1_000_000)] = 1000
    in_flight_load_producer_name: str = ""


class ObserverParameters(HubObserverParameters, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which requests count. Names are those of the reference picker, but windows have no effect, because the model forgets by itself.

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

    prefix_match_info_producer_name: str = ""
    high_percentile: Percentile = 50


class ApproxPrefixParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How prompts are cut into blocks, and how many blocks are kept. A limit of 0 means no limit, which is the default.

    Names and defaults are those of the reference picker, but blocks have at least 64 tokens.

    auto_tune: Keep as many blocks of a server as its metrics say that it can cache; without such metrics, `lru_capacity_per_server`.
    block_size_tokens: Tokens that are hashed as a unit.
    block_size: Deprecated: use `block_size_tokens`.
    max_prefix_tokens_to_match: How much of a prompt is matched, in tokens, at least one block. Overrides `max_prefix_blocks_to_match`.
    max_prefix_blocks_to_match: How much of a prompt is matched, in blocks.
    lru_capacity_per_server: How many blocks a server is assumed to hold.
    """

    auto_tune: bool = True
    block_size_tokens: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_TOKENS_MAX)] = BLOCK_TOKENS_DEFAULT
    block_size: Annotated[int, msgspec.Meta(ge=0, le=BLOCK_TOKENS_MAX)] = 0
    max_prefix_tokens_to_match: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_prefix_blocks_to_match: Annotated[int, msgspec.Meta(ge=0)] = 0
    lru_capacity_per_server: Annotated[int, msgspec.Meta(ge=1)] = LRU_CAPACITY


class UtilizationParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """When an endpoint is full, and for how long scraped values are used.

    queue_depth_threshold: Waiting requests at which an endpoint is full.
    kv_cache_util_threshold: Share of the KV cache at which an endpoint is full.
    metrics_staleness_threshold: The age up to which metrics are fresh for this detector, as a duration. Empty: the picker's limit.
    headroom: How far above a threshold the filter still keeps an endpoint, 0.2 for 20 %.
    staleness_policy: How full a stale or unknown endpoint is taken to be. Empty, the default: as full as its requests in flight make it.
    `saturated`: full, as in the reference picker; dispatch then stops when all scrapes fail. `ignore`: the endpoint is left out; if all
    endpoints are stale, the saturation is 0.
    """

    queue_depth_threshold: Annotated[int, msgspec.Meta(gt=0), tuned(1, 256)] = 5
    kv_cache_util_threshold: Annotated[float, msgspec.Meta(gt=0, le=1), tuned(0.5, 1)] = 0.8
    metrics_staleness_threshold: str = ""
    headroom: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    staleness_policy: Literal["", "saturated", "ignore"] = ""


QUEUE_TOKENS: Final = 4_194_304  # 128 requests of 32,768 tokens


class ActiveRequestsParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """When an endpoint is idle, and how high a busy endpoint can score.

    idle_threshold: An endpoint with at most this many requests is idle; a value below 0 means 0.
    max_busy_score: The highest possible score of a busy endpoint; a value outside 0 to 1 means 1.
    in_flight_load_producer_name: A listed `inflight-load-producer`. The name changes nothing: the picker counts the load for all plugins.
    request_timeout: Accepted, without effect: a request is in flight until its stream ends.
    """

    idle_threshold: int = 0
    max_busy_score: float | None = 1.0
    in_flight_load_producer_name: str = ""
    request_timeout: str = ""


class LearnedLatencyScorerParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Whose predictions are used, and how often other endpoints are tried.

    exploration_rate: The share of requests for which all endpoints whose first token is expected within 1.5 times the shortest time are
    treated as equal.
    learned_latency_producer_name: The producer of the predictions to read.
    """

    exploration_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.005
    learned_latency_producer_name: str = ""


class PrefixCacheParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How a prefix match becomes a score.

    prefix_match_info_producer_name: The producer of the prefix matches to read.
    match_length_weight: The weight of the match's length in tokens; the share of the prompt that the match covers has the rest.
    match_length_scale_tokens: The length from which on a match has the full score for its length.
    """

    prefix_match_info_producer_name: str = ""
    match_length_weight: Annotated[float, msgspec.Meta(ge=0, le=1), tuned(0, 1)] = 0.0
    match_length_scale_tokens: Annotated[int, msgspec.Meta(ge=0), tuned(256, 65_536)] = 8192


class TokenLoadParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """When an endpoint is full.

    queue_threshold_tokens: The load that scores 0; 0 or less means the default.
    in_flight_load_producer_name: A listed `inflight-load-producer`. The name changes nothing: the picker counts the load for all plugins.
    """

    queue_threshold_tokens: Annotated[int, tuned(4_096, QUEUE_TOKENS)] = QUEUE_TOKENS
    in_flight_load_producer_name: str = ""


class HoldbackParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The ceilings of the bands.

    min_ceiling: The ceiling of the lowest band.
    max_ceiling: The ceiling of the highest band.
    shape: How the ceilings of the other bands grow with the priority.
    domain: How far apart the ceilings are: equally far (`rank`), or in proportion to the distances of the priorities (`value`).
    """

    min_ceiling: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    max_ceiling: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    shape: Literal["linear"] = "linear"
    domain: Literal["rank", "value"] = "rank"


class NoParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """None."""


class UsageLimitParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One limit for all bands.

    threshold: The saturation at which all requests start to wait.
    """

    threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


TOKEN_HEADER: Final = "x-session-token"
AFFINITY_COUNTS_WITH: Final = {
    "encodedEndpointHeaderConfig": ("strategy", ("encoded_endpoint_header",)),
    "sessionIdConfig": ("strategy", ("session_id",)),
}


Seconds = Annotated[float, msgspec.Meta(ge=0)]


class EncodedParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The header that names the endpoint.

    header: The header of responses and requests that names the endpoint; empty means the default.
    """

    header: str = TOKEN_HEADER


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Where to read a session id: a request header, or a datum that a plugin emits. Give exactly one of `header` and `attribute`.

    header: The request header.
    attribute: The name of the datum.
    producer: The plugin that emits the datum, if its name is a part of the key of the datum.
    """

    header: str = ""
    attribute: str = ""
    producer: str = ""


class SessionParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Where session ids come from, and how long they are bound. A time of 0 means the default.

    sources: Where to look for an id, in order; the first id is used. Default: the header `x-session-id`.
    eviction_ttl_seconds: How long an unused binding is kept.
    eviction_sweep_seconds: The time between two searches for unused bindings.
    """

    sources: tuple[Source, ...] = ()
    eviction_ttl_seconds: Seconds = 300.0
    eviction_sweep_seconds: Seconds = 10.0


class AffinityParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How a session is recognised. Only the parameters of the chosen `strategy` have an effect.

    strategy: Put the endpoint into a header, or bind session ids to endpoints.
    encoded_endpoint_header_config: The parameters of the strategy with a header.
    session_id_config: The parameters of the strategy with session ids.
    profile_name: The profile whose endpoint is pinned; empty means the primary profile.
    """

    strategy: Literal["encoded_endpoint_header", "session_id"] = "encoded_endpoint_header"
    encoded_endpoint_header_config: EncodedParameters = EncodedParameters()
    session_id_config: SessionParameters = SessionParameters()
    profile_name: str = ""
