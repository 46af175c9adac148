"""Which prefix producer decides where requests go, for plugins that count cached tokens. Start-up only."""

from collections.abc import Sequence

from epp.plugin import Filter, Plugin, Scorer
from epp.prefix.match import FollowsMatches, only_producer


class ScoresOwnMatches(Plugin):
    """A scorer that does not follow matches as others do: `producer` tells whose it reads."""

    def producer(self, plugins: Sequence[Plugin]) -> str:
        """The name of the producer. `plugins`: all that the configuration lists."""
        raise NotImplementedError


class FollowsDecisions(FollowsMatches):
    """A plugin that counts cached tokens by the matches by which endpoints are chosen, unless a parameter names another producer."""

    def meet(self, plugins: Sequence[Plugin]) -> None:
        decides = deciding_producer(plugins)
        super().meet([plugin for plugin in plugins if plugin.name == decides])


def deciding_producer(plugins: Sequence[Plugin]) -> str:
    """The producer whose matches decide where requests go: that of the first scorer or filter that reads any, else the only one."""
    for plugin in plugins:
        if not isinstance(plugin, Scorer | Filter) or isinstance(plugin, FollowsDecisions):
            continue
        if isinstance(plugin, ScoresOwnMatches):
            return plugin.producer(plugins)
        if isinstance(plugin, FollowsMatches):
            return only_producer(plugins, getattr(plugin.params, "prefix_match_info_producer_name", ""))
    return only_producer(plugins)
