"""Run the only profile."""

from epp.plugin import plugin
from epp.plugins.profiles import OneProfile


@plugin("single-profile-handler")
class SingleProfile(OneProfile):
    """Runs the only configured profile once; its targets are the result."""
