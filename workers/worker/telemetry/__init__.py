"""Measures requests, streams and plugin calls: metrics in shared memory, and traces."""
