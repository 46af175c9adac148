"""Metric families of the kv-events process, computed when the page is read. They exist only with a precise prefix producer."""

from epp.metrics import Metric

SUBSCRIBERS = Metric("kv_cache_events_active_subscribers", "gauge", "Connections to event sockets of model servers.")
RECONNECTIONS = Metric("kv_cache_events_subscriber_reconnections_total", "counter", "Connections to event sockets that were lost.")
MESSAGES = Metric("kv_cache_events_messages_received_total", "counter", "Messages received from event sockets.")
MALFORMED = Metric("kv_cache_events_malformed_total", "counter", "Messages and events that are not as the protocol says; they are skipped.")
DROPPED = Metric(
    "kv_cache_events_dropped_total",
    "counter",
    "Messages that were dropped: their topic names no endpoint, or too many waited for a replay.",
)
GAPS = Metric("kv_cache_events_gaps_total", "counter", "Gaps in the numbers of messages.")
RESTARTS = Metric("kv_cache_events_publisher_restarts_total", "counter", "Publishers that began again with a lower number.")
REPLAYS_FAILED = Metric("kv_cache_events_replays_failed_total", "counter", "Replays without an answer, or without an end.")
STORES_SKIPPED = Metric(
    "kv_cache_events_stores_skipped_total",
    "counter",
    "Stored events without effect: another group's blocks, an unknown parent, or no room.",
)
REMOVALS_SKIPPED = Metric("kv_cache_events_removals_skipped_total", "counter", "Removed blocks that the picker did not know of.")
SUPPRESSED = Metric("kv_cache_events_dedup_removed_hashes_suppressed_total", "counter", "Removed blocks of which another copy is held.")
FORWARDED = Metric("kv_cache_events_dedup_removed_hashes_forwarded_total", "counter", "Removed blocks of which no other copy is held.")
ADMISSIONS = Metric("kv_cache_index_admissions_total", "counter", "Blocks that were added to the index of held blocks.")
EVICTIONS = Metric(
    "kv_cache_index_evictions_total", "counter", "Blocks that left the index of held blocks: removed by events, or overwritten."
)
OVERWRITTEN = Metric(
    "kv_cache_index_overwritten_total", "counter", "Held blocks that were overwritten in a full index: raise --kv-index-blocks."
)
ENTRIES = Metric("kv_cache_index_entries", "gauge", "Entries in use in the index of held blocks.")
QUEUE_DEPTH = Metric("kv_cache_events_pool_queue_depth", "gauge", "Messages that wait until missed ones have been replayed.")
CAPACITY = Metric("kv_cache_events_pool_capacity", "gauge", "Processes that read events.")
ERRORS = Metric("kv_cache_events_zmq_errors_total", "counter", "Connections to event sockets whose peer does not speak ZeroMQ.")
PRECISE = Metric(
    "kv_cache_events_precise",
    "gauge",
    "Whether requests whose tokens are known are matched precisely, by what the endpoint says it holds; 0: approximately.",
)
STREAM_AGE = Metric("kv_cache_events_age_seconds", "gauge", "Time since the last message from the endpoint's event socket.")
HELD = Metric("kv_cache_events_held_blocks", "gauge", "Blocks that the endpoint says it holds, in all tiers.")
NOT_PRECISE = Metric("kv_cache_events_not_precise", "gauge", "Endpoints that are matched approximately, by reason.", labels=("reason",))
