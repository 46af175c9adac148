"""Prefix affinity: prompt bytes -> block hashes -> frames by which a worker updates the prefix index."""
