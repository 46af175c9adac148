"""Admitters: which requests are taken at all. They stop those that may be shed: priority below 0."""
