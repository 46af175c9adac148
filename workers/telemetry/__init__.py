"""Measures requests, streams and plugin calls: metrics in shared memory, and traces.

May import: shared and all below it. Imported by: flow and all above it.
"""
