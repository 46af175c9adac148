"""`epp size`: cores, memory and flags for a load.

May import: what tests/layers.py names. Imported by: tests and loadtest.commands.
"""
