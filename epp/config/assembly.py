"""Holds the wired plugin instances of one configuration, before they are compiled.

`epp.config.assembler` builds an `Assembly`, `epp.config.wiring_checks` and `epp.config.lint` check it, `epp.config.load` compiles it.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from epp.config.contracts import HOOKS
from epp.data import Column
from epp.decision.pipeline import WiredProfile
from epp.flow.plan import FlowPlan
from epp.plugin import (
    Admitter,
    DataProducer,
    DataSource,
    Discovery,
    Extractor,
    Filter,
    Parser,
    Picker,
    Plugin,
    ProfileHandler,
    RequestHeader,
    SaturationDetector,
    Scorer,
    Screener,
)  # fmt: skip

SCHEDULING: Final = (Filter, Scorer, Picker)  # kinds that belong in a scheduling profile
SELF_ACTING: Final = (*HOOKS, RequestHeader, Screener, Admitter)  # kinds that run without a reference


@dataclass(frozen=True, slots=True)
class Scraped:
    """Joins a data source and the extractors that read its pages."""

    source: DataSource
    extractors: tuple[Extractor, ...]


@dataclass(slots=True)
class Assembly:
    """Holds the wired plugins of one configuration. It is complete only if the assembler found no error."""

    plugins: dict[str, Plugin]
    types: dict[str, str]  # plugin name -> its type, by the name that a configuration should use
    profiles: list[WiredProfile] = field(default_factory=list)
    handler: ProfileHandler | None = None
    parsers: list[Parser] = field(default_factory=list)
    sources: list[Scraped] = field(default_factory=list)
    discovery: Discovery | None = None
    saturation: SaturationDetector | None = None
    flow: FlowPlan | None = None
    producers: tuple[DataProducer, ...] = ()
    columns: tuple[Column[Any], ...] = ()
