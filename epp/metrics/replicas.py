"""Metric families of the exchange between replicas, computed when the page is read. They exist only with a replica store."""

from epp.metrics import counter, gauge

CONNECTED = gauge("replica_store_connected", "Whether the replica store can be used now.")
STORE_ERRORS = counter(
    "replica_store_errors_total",
    "Failures of the replica store, by cause: unreachable, slow, refused (user or password), denied (ACL), full, read-only, error, file.",
    "cause",
)
CONNECTIONS = counter("replica_store_connections_total", "Connections to the replica store.")
REPLICAS = gauge("replicas", "Replicas that share what they know, including this one.")
AGE = gauge("replica_age_seconds", "Time since the last message of another replica.", "replica")
REQUESTS = gauge("replica_inflight_requests", "Requests in flight that another replica reports.", "replica")
LAG = gauge("replica_lag_seconds", "Delay of this replica's last complete message through the store.")
MESSAGES = counter("replica_messages_total", "Messages between replicas, by direction: sent, received.", "direction")
BYTES = counter("replica_bytes_total", "Bytes of messages between replicas, by direction.", "direction")
DROPPED = counter(
    "replica_dropped_total",
    "Messages and index updates that were ignored, by cause. Messages: lost, old, many (more replicas than --replicas-max), rate (more per "
    "second than a replica sends), form (another version), malformed, long, copy (of an index that does not fit), copies (too many wanted "
    "one), page (metrics pages with other values than this replica reads). Updates of the prefix index: backlog (too many waited), secret "
    "(another secret).",
    "cause",
)
COPIED = counter("replica_copied_entries_total", "Entries of the prefix index that came from another replica's copy.")
PAGES = counter("replica_pages_total", "Metrics pages that another replica has read, and this one has used instead of reading them.")
FOREIGN = gauge(
    "replicas_with_another_secret",
    "Replicas that have another secret of block hashes than this one, and the store if it has; above 0, prefixes are not shared.",
)
