"""The parent process: it creates what its children inherit (shared memory, sockets, pipes, certificates), forks and restarts them.

A process may fork only while it has one thread and no event loop. So `parent`, `fork`, `restart`, and all of our modules that they
import at module level, must not import asyncio, grpc or any other module that starts a thread or a loop.
"""


class StartError(Exception):
    """Raised if the picker cannot start, for example because the machine refuses memory or a port. The text names cause, rule and fix."""


class Unusable(StartError):
    """Raised if a flag is wrong, or if a file is wrong that a flag or the configuration names. Starting again does not help."""
