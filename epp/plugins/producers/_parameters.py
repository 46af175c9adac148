"""The parameters of the compiled producers, but precise-prefix-cache-producer. Not compiled: msgspec reads annotations at run time."""

from typing import Annotated, Final

import msgspec

COUNTS_WITH: Final = dict.fromkeys(("outputRatio", "maxEstimatedOutputTokens"), ("addEstimatedOutputTokens", (True,)))
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Percentile = Annotated[int, msgspec.Meta(ge=1, le=99)]
BLOCK_TOKENS_MAX: Final = 1 << 20  # with larger blocks, no prompt would have a whole block
BLOCK_TOKENS_DEFAULT: Final = 16  # the reference picker's default; means BLOCK_TOKENS_MIN here
LRU_CAPACITY: Final = 31250


class InflightParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
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


class LearnedLatencyParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
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


class ApproxPrefixParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How prompts are cut into blocks, and how many blocks are kept. A limit of 0 means no limit, which is the default.

    Names and defaults are those of the reference picker, but blocks have at least 64 tokens.

    auto_tune: Keep as many blocks of a server as its own metrics say it can cache; without such metrics, `lru_capacity_per_server`.
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
