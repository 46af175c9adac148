"""Shared-memory structures: segments, an endpoint table, documents, areas and a prefix index.

This package knows bytes, rows, owners and versions. It does not know requests, models or metrics.
Exactly one process writes each shared word, and there are no locks. A reader that meets a half-written value retries a bounded number
of times and then keeps the value that it read last.
"""

from compiled.finder import choose

choose()
