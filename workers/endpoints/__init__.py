"""Discovers endpoints and scrapes their metrics. Publishes table rows, names, and limits of the prefix index in shared memory.

May import: flow and all packages below it. Imported by: process and all packages above it.
"""
