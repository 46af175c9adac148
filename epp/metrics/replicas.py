"""Metric families of what replicas exchange, computed when the page is read. They exist only with a replica store."""

from epp.metrics import Metric

CONNECTED = Metric("replica_store_connected", "gauge", "Whether the replica store can be used now.")
STORE_ERRORS = Metric(
    "replica_store_errors_total",
    "counter",
    "Failures of the replica store, by cause: unreachable, slow, refused (user or password), denied (ACL), full, read-only, error, file.",
    labels=("cause",),
)
CONNECTIONS = Metric("replica_store_connections_total", "counter", "Connections to the replica store.")
REPLICAS = Metric("replicas", "gauge", "Replicas that share what they know, including this one.")
AGE = Metric("replica_age_seconds", "gauge", "Time since the last message of another replica.", labels=("replica",))
REQUESTS = Metric("replica_inflight_requests", "gauge", "Requests in flight that another replica reports.", labels=("replica",))
LAG = Metric("replica_lag_seconds", "gauge", "Delay of this replica's last complete message through the store.")
MESSAGES = Metric("replica_messages_total", "counter", "Messages between replicas, by direction: sent, received.", labels=("direction",))
BYTES = Metric("replica_bytes_total", "counter", "Bytes of messages between replicas, by direction.", labels=("direction",))
DROPPED = Metric(
    "replica_dropped_total",
    "counter",
    "Messages and index updates that were ignored, by cause. Messages: lost, old, many (more replicas than --replicas-max), rate (more per "
    "second than a replica sends), form (another version), malformed, long, copy (of an index that does not fit), copies (too many wanted "
    "one), page (metrics pages with other values than this replica reads). Updates of the prefix index: backlog (too many waited), secret "
    "(another secret).",
    labels=("cause",),
)
COPIED = Metric("replica_copied_entries_total", "counter", "Entries of the prefix index that came from another replica's copy.")
PAGES = Metric(
    "replica_pages_total", "counter", "Metrics pages that another replica has read, and this one has used instead of reading them."
)
FOREIGN = Metric(
    "replicas_with_another_secret",
    "gauge",
    "Replicas that have another secret of block hashes than this one, and the store if it has; above 0, prefixes are not shared.",
)
