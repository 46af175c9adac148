"""`epp size`: cores, memory and flags for a load.

May import: the modules that tests/layers.py names. Imported by: tests and loadtest.commands.
"""
