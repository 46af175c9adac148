"""Prefix affinity: prompt bytes -> block hashes -> frames by which a worker updates the prefix index.

May import: words, values and extension points of epp. Imported by: the rows of epp above it, and workers.
"""
