"""Finds the producer of the prefix matches that decide where requests go, for plugins that count cached tokens. This runs only at the
start.
"""

from collections.abc import Sequence

from epp.plugin import Filter, Plugin, Scorer
from epp.prefix.match import APPROXIMATE, FollowsMatches, only_producer, read_producer


class ScoresOwnMatches(Plugin):
    """Base class of scorers that read prefix matches but are not a `FollowsMatches`."""

    def producer(self, plugins: Sequence[Plugin]) -> str:
        """Returns the name of the producer of the matches that the scorer reads. `plugins`: all plugins that the configuration lists."""
        raise NotImplementedError


class FollowsDecisions(FollowsMatches):
    """Base class of plugins that count cached tokens.

    They read the matches that decide where requests go, unless the parameter `prefixMatchInfoProducerName` names another producer.
    """

    def meet(self, plugins: Sequence[Plugin]) -> None:
        decides = deciding_producer(plugins)
        super().meet([plugin for plugin in plugins if plugin.name == decides])


def deciding_producer(plugins: Sequence[Plugin]) -> str:
    """Returns the name of the producer of the matches that decide where requests go.

    These are the matches that the first scorer or filter reads; a `FollowsDecisions` does not count. If no scorer or filter reads matches,
    returns the name of the only producer, or APPROXIMATE if there is none or several.
    """
    for plugin in plugins:
        if not isinstance(plugin, Scorer | Filter) or isinstance(plugin, FollowsDecisions):
            continue
        if isinstance(plugin, ScoresOwnMatches):
            return plugin.producer(plugins)
        if isinstance(plugin, FollowsMatches):
            return read_producer(plugins, getattr(plugin.params, "prefix_match_info_producer_name", ""))
    only = only_producer(plugins)
    return APPROXIMATE if only is None else only.name
