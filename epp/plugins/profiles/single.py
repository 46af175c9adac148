"""One profile: run it once, its targets are the result."""

from epp.plugin import plugin
from epp.plugins.profiles import OneProfile


@plugin("single-profile-handler")
class SingleProfile(OneProfile):
    """For configurations with exactly one profile."""
