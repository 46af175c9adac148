"""The error of readers of traces."""


class Unreadable(Exception):
    """Says that a file or folder cannot be read as a recording. The text names it and says why."""
