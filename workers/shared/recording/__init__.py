"""Files of recordings: how the supervisor writes them, and how commands read them.

May import: shared and all below it. Imported by: telemetry and all above it.
"""


class Unreadable(Exception):
    """Says that a file or folder cannot be read as a recording. The text names it and says why."""
