"""Errors that keep a picker from starting."""


class StartError(Exception):
    """The picker cannot start, for example because the machine refuses memory or a port. The text names cause, rule and fix."""


class Unusable(StartError):
    """A flag is wrong, or a file is wrong that a flag or the configuration names. Starting again does not help."""
