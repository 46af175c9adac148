"""Holds the wired plugin instances of one configuration, before they are compiled.

`epp.config.assembler` builds an `Assembly`, `epp.config.wiring_checks` and `epp.config.lint` check it, `epp.config.load` compiles it.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from epp import plugin as points
from epp.config.contracts import HOOKS
from epp.data import Column
from epp.decision.pipeline import WiredProfile
from epp.flow.plan import FlowPlan
from epp.plugin import Plugin

SCHEDULING: Final = (points.Filter, points.Scorer, points.Picker)  # kinds that belong in a scheduling profile
SELF_ACTING: Final = (*HOOKS, points.RequestHeader, points.Screener, points.Admitter)  # kinds that run without a reference


@dataclass(frozen=True, slots=True)
class Scraped:
    """Joins a data source and the extractors that read its pages."""

    source: points.DataSource
    extractors: tuple[points.Extractor, ...]


@dataclass(slots=True)
class Assembly:
    """Holds the wired plugins of one configuration. It is complete only if the assembler found no error."""

    plugins: dict[str, Plugin]
    types: dict[str, str]  # plugin name -> its type, by the name that a configuration should use
    profiles: list[WiredProfile] = field(default_factory=list)
    handler: points.ProfileHandler | None = None
    parsers: list[points.Parser] = field(default_factory=list)
    sources: list[Scraped] = field(default_factory=list)
    discovery: points.Discovery | None = None
    saturation: points.SaturationDetector | None = None
    flow: FlowPlan | None = None
    producers: tuple[points.DataProducer, ...] = ()
    columns: tuple[Column[Any], ...] = ()
