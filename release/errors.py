"""The two ways in which a part of a release is not made."""


class Refused(Exception):
    """Raised if the tree cannot be released. The text says what to do."""


class Missing(Exception):
    """Raised if a tool for one part is missing on this machine. The text names it. The other parts are made."""
