"""Reads and checks the configuration file and compiles it into a pipeline.

This package runs at start-up; no module on the request path imports it.
"""
