"""The compiled form of a configuration: tuples of bound methods, immutable, behind one reference."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epp import instrument
from epp.candidates import Candidates
from epp.data import Column
from epp.decision import Decision
from epp.plugin import (
    DataProducer,
    Filter,
    Parser,
    Picker,
    Plugin,
    PreRequest,
    Profile,
    ProfileHandler,
    ResponseComplete,
    ResponseReceived,
    ResponseStreaming,
    Scorer,
    Services,
    Usage,
)  # fmt: skip
from epp.request import Request


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a worker runs per request. `plugins` are all instances by name, in the order in which they were made."""

    plugins: Mapping[str, Plugin]
    parsers: tuple[Parser, ...]
    handler: ProfileHandler
    profiles: Mapping[str, Profile]
    producers: tuple[Callable[[Request, Candidates], Any], ...]
    pre_request: tuple[Callable[[Request, Decision], None], ...]
    response_received: tuple[Callable[[Request, Decision, int], None], ...]
    response_streaming: tuple[Callable[[Request, Decision], None], ...]
    response_complete: tuple[Callable[[Request, Decision, Usage | None], None], ...]
    columns: tuple[Column[Any], ...] = field(default=())

    def start(self, services: Services) -> None:
        """Starts every plugin in this process."""
        for instance in self.plugins.values():
            instance.start(services)


def compile_profile(name: str, members: Sequence[tuple[Plugin, float]]) -> Profile:
    """One profile; a plugin that implements several roles gets all of them. Exactly one picker is among the members."""
    filters = tuple(p.keep for p, _ in members if isinstance(p, Filter))
    scorers = [(p.static, instrument.scorer(p), weight) for p, weight in members if isinstance(p, Scorer)]
    (picker,) = (p for p, _ in members if isinstance(p, Picker))
    return Profile(
        name,
        filters,
        tuple((score, weight) for static, score, weight in scorers if not static),
        picker,
        tuple((score, weight) for static, score, weight in scorers if static),
    )


def compile_pipeline(
    plugins: Sequence[Plugin],
    *,
    parsers: Sequence[Parser],
    handler: ProfileHandler,
    profiles: Sequence[Profile],
    producers: Sequence[DataProducer],
    columns: Sequence[Column[Any]],
) -> Pipeline:
    """`producers` come in the order in which they run; `columns` are all that any plugin declares, in a fixed order."""
    return Pipeline(
        plugins={p.name: p for p in plugins},
        parsers=tuple(parsers),
        handler=handler,
        profiles={profile.name: profile for profile in profiles},
        producers=tuple(p.produce for p in producers),
        pre_request=tuple(p.before_send for p in plugins if isinstance(p, PreRequest)),
        response_received=tuple(p.response_received for p in plugins if isinstance(p, ResponseReceived)),
        response_streaming=tuple(p.response_streaming for p in plugins if isinstance(p, ResponseStreaming)),
        response_complete=tuple(p.response_complete for p in plugins if isinstance(p, ResponseComplete)),
        columns=tuple(columns),
    )
