"""Files of recordings: how the supervisor writes them, and how commands read them.

May import: shared and all below it. Imported by: telemetry and all above it.
"""
