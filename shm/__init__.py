"""Shared-memory structures: segments, an endpoint table, documents, lanes and a prefix index.

This package knows bytes, rows, owners and versions; it does not know requests, models or metrics.
Every shared word has exactly one writing process and nothing is ever locked: readers retry a
bounded number of times or keep what they read last.
"""
