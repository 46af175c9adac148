"""Discovers endpoints, scrapes their metrics, and publishes both in shared memory: table rows, names, and limits of the prefix index.

May import: flow and all packages below it. Imported by: process and all packages above it.
"""
