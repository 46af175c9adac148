"""Defines types that all extractors of pages share: the values of a page, the error of a rejected page, the reader of a server's pages."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from epp.data import Column
from epp.plugin import Extractor

# The beginning of the text about a server with a rejected page or with unreadable values.
REFUSED_PAGE: Final = "its metrics page is refused: "
UNREAD_VALUES: Final = "its metrics page has values that cannot be read: "
METRICS, MODELS = "metrics", "models"  # kinds of pages: Prometheus text; the JSON answer of /v1/models


NONE: Final[Mapping[str, str]] = MappingProxyType({})


class ExtractError(Exception):
    """Says why a page is rejected. The text names the metric and the rule."""


class Extracted(NamedTuple):
    """Holds the values of one page.

    `values` has one number for each wanted numeric column, in order, never NaN. Bit i of `present` is set if the page reported value
    i. `names`: wanted column that is a set of names -> the set. While the server reports the same text, the sets stay the same objects.
    `problems`: cause -> text that names an unreadable metric and the rule. The same problem has the same cause on the next page.
    """

    values: tuple[float, ...]
    present: int
    names: Mapping[str, frozenset[str]]
    problems: Mapping[str, str] = NONE


class Reader(Protocol):
    """Reads the pages of one server."""

    def extract(self, page: bytes) -> Extracted:
        """Returns the page's values. Raises ExtractError if the page is rejected."""


class PageExtractor(Extractor):
    """Base class of the extractors that read pages. `pages`: the kind of pages that the extractor reads."""

    pages: ClassVar[str] = METRICS

    def extraction(self, labels: Mapping[str, str], wanted: Sequence[Column[Any]], pod: str = "") -> Reader:
        """Returns a reader for the pages of the server with these labels. Make a new reader when the labels change.

        `wanted`: the columns of the endpoint table; the reader fills those that its extractor produces. `pod`: the server's pod.
        """
        raise NotImplementedError


def check_whole(page: bytes) -> None:
    """Raises ExtractError unless the page ends with a whole line. Only `# EOF`, the end of an OpenMetrics page, may lack its newline."""
    if page[-1:] != b"\n" and page.rpartition(b"\n")[2] != b"# EOF":
        raise ExtractError("the page does not end with a newline: it is empty or truncated")
