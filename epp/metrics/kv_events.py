"""Metric families of the kv-events process, computed when the page is read. They exist only with a precise prefix producer."""

from epp.metrics import counter, gauge

SUBSCRIBERS = gauge("kv_cache_events_active_subscribers", "Connections to event sockets of model servers.")
RECONNECTIONS = counter("kv_cache_events_subscriber_reconnections_total", "Connections to event sockets that were lost.")
MESSAGES = counter("kv_cache_events_messages_received_total", "Messages received from event sockets.")
MALFORMED = counter("kv_cache_events_malformed_total", "Messages and events that are not as the protocol says; they are skipped.")
DROPPED = counter(
    "kv_cache_events_dropped_total", "Messages that were dropped: their topic names no endpoint, or too many waited for a replay."
)
GAPS = counter("kv_cache_events_gaps_total", "Gaps in the numbers of messages.")
RESTARTS = counter("kv_cache_events_publisher_restarts_total", "Publishers that began again with a lower number.")
REPLAYS_FAILED = counter("kv_cache_events_replays_failed_total", "Replays without an answer, or without an end.")
STORES_SKIPPED = counter(
    "kv_cache_events_stores_skipped_total", "Stored events without effect: another group's blocks, an unknown parent, or no room."
)
REMOVALS_SKIPPED = counter("kv_cache_events_removals_skipped_total", "Removed blocks that the picker did not know of.")
SUPPRESSED = counter("kv_cache_events_dedup_removed_hashes_suppressed_total", "Removed blocks of which another copy is held.")
FORWARDED = counter("kv_cache_events_dedup_removed_hashes_forwarded_total", "Removed blocks of which no other copy is held.")
ADMISSIONS = counter("kv_cache_index_admissions_total", "Blocks that were added to the index of held blocks.")
EVICTIONS = counter("kv_cache_index_evictions_total", "Blocks that left the index of held blocks: removed by events, or overwritten.")
OVERWRITTEN = counter("kv_cache_index_overwritten_total", "Held blocks that were overwritten in a full index: raise --kv-index-blocks.")
ENTRIES = gauge("kv_cache_index_entries", "Entries in use in the index of held blocks.")
QUEUE_DEPTH = gauge("kv_cache_events_pool_queue_depth", "Messages that wait until missed ones have been replayed.")
CAPACITY = gauge("kv_cache_events_pool_capacity", "Processes that read events.")
ERRORS = counter("kv_cache_events_zmq_errors_total", "Connections to event sockets whose peer does not speak ZeroMQ.")
PRECISE = gauge(
    "kv_cache_events_precise",
    "1 if the picker matches requests with known tokens by the blocks that the endpoint reports; 0 if approximately.",
)
STREAM_AGE = gauge("kv_cache_events_age_seconds", "Time since the last message from the endpoint's event socket.")
HELD = gauge("kv_cache_events_held_blocks", "Blocks that the endpoint says it holds, in all tiers.")
NOT_PRECISE = gauge("kv_cache_events_not_precise", "Endpoints that are matched approximately, by reason.", "reason")
