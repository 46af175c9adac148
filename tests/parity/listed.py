"""Reads the list, and finds in the code what the list speaks of."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import msgspec

from epp.config import registry, schema
from epp.metrics.catalogue import TAKEN
from epp.points.guard import VIOLATIONS
from workers.cli.serve_flags import FLAGS

ROOT: Final = Path(__file__).parents[2]
LIST: Final = Path(__file__).with_name("reference.toml")
VERDICTS: Final = ("better", "different", "absent")
HEADER: Final = re.compile(r"""["'](x-[a-z0-9-]+|prefer|test-epp-[a-z-]+)["']""")
# Deprecated forms of a band's templates: they have the fields of a band, which the list names once.
TEMPLATES: Final = ("flowControl.defaultPriorityBand.", "flowControl.defaultNegativePriorityBand.")


class Section(NamedTuple):
    """One part of the list. `why` has the names under better, different and absent, with the reasons."""

    title: str
    note: str
    same: tuple[str, ...]
    why: Mapping[str, Mapping[str, str]]

    def here(self) -> set[str]:
        """The names that exist here."""
        return {*self.same, *self.why["better"], *self.why["different"]}

    def all(self) -> list[str]:
        return [*self.same, *(name for names in self.why.values() for name in names)]


def read() -> tuple[Mapping[str, str], dict[str, Section]]:
    """What is compared, and the sections by their names."""
    document: dict[str, Any] = tomllib.loads(LIST.read_text())
    about = document.pop("about")
    return about, {name: _section(part) for name, part in document.items()}


def _section(part: dict[str, Any]) -> Section:
    why = {verdict: part.get(verdict, {}) for verdict in VERDICTS}
    return Section(part["title"], part.get("note", ""), tuple(part["same"].split()), why)


def in_code() -> dict[str, set[str]]:
    """The names of this picker by section. Headers: all that its code has as text."""
    return {"types": types(), "flags": flags(), "headers": headers(), "metrics": metrics(), "fields": fields()}


def types() -> set[str]:
    own = ("epp.plugins.",)
    return {name for name, cls in registry.known().items() if cls.__module__.startswith(own)}


def flags() -> set[str]:
    def function() -> None:
        """Carries the flags."""

    for decorate in FLAGS:
        decorate(function)
    options: list[click.Option] = function.__click_params__  # type: ignore[attr-defined]
    return {word.lstrip("-") for option in options for word in option.opts if word.startswith("--")}


def headers() -> set[str]:
    sources = (path.read_text() for folder in ("epp", "workers") for path in (ROOT / folder).rglob("*.py"))
    return {name for source in sources for name in HEADER.findall(source)}


def metrics() -> set[str]:
    own = (cls for cls in registry.known().values() if cls.__module__.startswith("epp.plugins."))
    return {*TAKEN, VIOLATIONS.name} | {metric.name for cls in own for metric in cls.metrics if isinstance(cls.metrics, tuple)}


def fields() -> set[str]:
    return {path for path in _fields(schema.Configuration, "") if not path.startswith(TEMPLATES)}


def _fields(form: type[msgspec.Struct], before: str) -> Iterator[str]:
    for field in msgspec.structs.fields(form):
        path = f"{before}{field.encode_name}"
        yield path
        for inner in _structs(msgspec.inspect.type_info(field.type)):
            yield from _fields(inner, f"{path}.")


def _structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """The structs inside optional, annotated and list types."""
    if isinstance(kind, msgspec.inspect.StructType):
        yield kind.cls
    for child in (*getattr(kind, "types", ()), getattr(kind, "item_type", None), getattr(kind, "type", None)):
        if child is not None:
            yield from _structs(child)
