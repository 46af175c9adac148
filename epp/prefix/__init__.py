"""Prefix affinity: prompt bytes -> block hashes -> what a worker tells the index writer."""
