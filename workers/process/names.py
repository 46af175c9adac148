"""The names that have places in shared memory: the columns of the endpoint table, the histograms and counters of plugins."""

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec

from epp.data import COUNTED, SHOWN, Column
from epp.decision.pipeline import Pipeline
from epp.metrics import Group, Metric
from epp.metrics.areas import PLUGIN_DURATION, STREAM_DURATION, WORKER_HISTOGRAMS
from epp.metrics.catalogue import plugin_groups
from epp.metrics.flow_control import FLOW_CYCLE
from epp.points import guard
from workers.process import StartError

if TYPE_CHECKING:
    from epp.config.effective import EffectiveConfig
    from workers.host.options import Options


class Family(NamedTuple):
    """One histogram in the areas. The labels of a plugin's histogram name the plugin.

    If the histogram has the durations of the plugin's calls, its labels also name the extension point.
    """

    metric: Metric
    plugin_name: str = ""
    plugin_type: str = ""
    extension_point: str = ""

    @property
    def key(self) -> str:
        parts = (self.metric.name, self.extension_point, self.plugin_name, self.plugin_type)
        return "@".join(part for part in parts if part)

    @property
    def labels(self) -> dict[str, str]:
        if self.extension_point:
            return {"extension_point": self.extension_point, "plugin_type": self.plugin_type, "plugin_name": self.plugin_name}
        return {"plugin_name": self.plugin_name, "plugin_type": self.plugin_type} if self.plugin_name else {}


FIXED: Final = (*(Family(metric) for metric in (*WORKER_HISTOGRAMS, STREAM_DURATION)), Family(FLOW_CYCLE))
CYCLES: Final = FIXED[-1]  # without flow control, the metrics page does not show this histogram


class Names(msgspec.Struct, frozen=True, array_like=True):
    """The names from all configurations so far that have places in an instance's shared memory, in the order of the places.

    `columns`: the columns of the endpoint table. `families`: the histograms. `groups`: the counters of plugins; the first `own` groups have
    their own tables, and the other groups have spare tables. `width`: the number of columns of a table row. `area_end`: the size of an area
    in words.
    """

    columns: tuple[str, ...] = ()
    families: tuple[Family, ...] = ()
    groups: tuple[Group, ...] = ()
    width: int = 0
    area_end: int = 0
    own: int = 0

    @property
    def count(self) -> int:
        """Returns the number of names. Names are only added, so the larger of two objects has all names of the other one."""
        return len(self.columns) + len(self.families) + len(self.groups)


N = TypeVar("N")


def _joined(known: Sequence[N], more: Sequence[N]) -> tuple[N, ...]:
    """Returns `known`, and then each item of `more` that is not in `known`, once."""
    return (*known, *(each for each in dict.fromkeys(more) if each not in known))


def check_names(members: Sequence[Family], groups: Sequence[Group]) -> None:
    """Raises StartError if two metrics of plugins have the same name but different labels, buckets or help texts."""
    first: dict[str, object] = {}
    for name, declared in (*((family.key, family) for family in members), *((group.name, group) for group in groups)):
        if first.setdefault(name, declared) != declared:
            raise StartError(
                f"the metric {name} has other labels, buckets or another help text than before: give it another name, or restart the picker"
            )


class Declared(NamedTuple):
    """The names of one configuration that need places: the histograms and counters of its plugins, and the columns that it reads."""

    families: tuple[Family, ...]
    groups: tuple[Group, ...]
    columns: tuple[Column[Any], ...]


def declared(options: "Options", config: "EffectiveConfig") -> Declared:
    """Returns the names of a configuration that need places. Raises StartError for a metric that no area can hold."""
    plugins = config.pipeline.wiring.plugins
    groups = plugin_groups((*(m for p in plugins for m in p.metrics), *guard.declared(plugins)))
    members = families(config.pipeline, timed=options.plugin_metrics)[len(FIXED) - 1 :]
    return Declared(members, groups, tuple(scraped_columns(config.pipeline)))


def names_of(options: "Options", configs: Iterable["EffectiveConfig"]) -> Names:
    """Returns the names of several configurations, without sizes. Raises StartError, as `declared` does."""
    return functools.reduce(lambda known, config: with_names(known, declared(options, config)), configs, Names())


def with_names(known: Names, more: Declared) -> Names:
    numeric = tuple(column.name for column in more.columns if column.type is not frozenset)
    return msgspec.structs.replace(
        known,
        columns=_joined(known.columns, numeric),
        families=_joined(known.families, more.families),
        groups=_joined(known.groups, more.groups),
    )


def scraped_columns(pipeline: Pipeline) -> list[Column[Any]]:
    """Returns the columns to fill from model servers' pages, sorted by name: plugins read them, or the metrics page shows them."""
    columns: list[Column[Any]] = [*SHOWN, *pipeline.columns]
    wanted = {c.name: c for c in columns if c.name not in COUNTED}
    return [wanted[name] for name in sorted(wanted)]


def families(pipeline: Pipeline, *, timed: bool = True) -> tuple[Family, ...]:
    """Returns all histograms of an area: of workers, of plugins, and if `timed`, the durations of plugins' calls.

    Raises StartError if a plugin declares a histogram with labels.
    """
    members = list(FIXED[:-1])
    points = pipeline.timed_points() if timed else ()
    members += [Family(PLUGIN_DURATION, plugin.name, plugin.type_name, point) for point, plugin in points]
    for plugin in pipeline.plugins.values():
        for metric in plugin.metrics:
            if metric.kind == "histogram" and metric.labels:
                raise StartError(
                    f"plugin '{plugin.name}' declares {metric.name} as {metric.kind} with labels {metric.labels}: "
                    "plugins can have counters and gauges, and histograms without labels"
                )
            if metric.kind == "histogram":
                members.append(Family(metric, plugin.name, plugin.type_name))
    return tuple(members)
