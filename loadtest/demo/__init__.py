"""The parts of `epp demo`: Envoy, simulated model servers, a picker, users who chat, and a live view.

May import: the modules that tests/layers.py names. Imported by: tests and loadtest.commands.
"""
