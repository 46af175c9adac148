"""Which parser reads the bodies of a path: the longest claimed suffix wins, a parser that claims nothing takes the rest."""

from typing import Final

from epp.errors import Cause, Refused
from epp.pipeline import Pipeline
from epp.plugin import Parser

DEFAULT_PATH: Final = "/v1/completions"  # where the gateway names none
KNOWN_MAX: Final = 1024


class Parsers:
    """The parsers of a pipeline by path, each with the place of its call in `Pipeline.parses`."""

    def __init__(self, pipeline: Pipeline) -> None:
        parsers = [(parser, place) for place, parser in enumerate(pipeline.recipe.parsers)]
        self._suffixes = sorted(
            ((suffix.strip("/"), p) for p in reversed(parsers) for suffix in p[0].paths),
            key=lambda entry: len(entry[0]),
            reverse=True,
        )
        self._reach = 1 + max((len(suffix) for suffix, _ in self._suffixes), default=0)  # with a slash behind it
        self._fallback = next((p for p in parsers if not p[0].paths), None)
        self._known: dict[str, tuple[Parser, int]] = {}

    def find(self, path: str) -> tuple[Parser, int]:
        """`path` has no query string. Raises Refused."""
        end = path[-self._reach :]  # no more is remembered: paths may be long
        found = self._known.get(end)
        if found is None:
            trimmed = end.removesuffix("/")
            found = next((p for suffix, p in self._suffixes if trimmed.endswith(suffix)), self._fallback)
            if found is None:
                raise Refused(Cause.NO_PARSER, path)
            if len(self._known) >= KNOWN_MAX:  # paths come from clients: bounded
                self._known.clear()
            self._known[end] = found
        return found
