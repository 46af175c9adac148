"""Scans a page in the Prometheus text format for single metric families, without parsing the rest.

A `Finder` belongs to one selector and to the pages of one server. Pages change little from scrape to scrape. So the finder
remembers the text before the value, and where it stands. On the next page the same text is usually at the same position, and the
value costs no scan. The finder uses this only while the family has a single series. Otherwise it reads all series of the family
again.

The finder relies on two rules of the format: the series of a family are adjacent, and the TYPE line, if any, precedes
them. It skips comments, blank lines, CRLF, exemplars and other families.

The finder does not judge values: it returns NaN and infinities. If a value is not a number, or labels cannot be read, it raises
`Malformed`.
"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from compiled.calls import recall

SERIES_MAX: Final = 16_384  # series that are read per metric family; more would only cost time
FAMILY_BYTES_MAX: Final = 1 << 20  # from the first series of a family to the last
SHIFT_BYTES_MAX: Final = 256  # if a family stands further than this from its old position, the whole page is searched

_SELECTOR: Final = re.compile(r"\s*([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{(.*)\})?\s*", re.DOTALL)
_MATCHER: Final = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*(?:"([^"]*)"|([^\s",{}=~]+))\s*(?:,|$)', re.DOTALL)
_SERIES: Final = re.compile(rb'[ \t]*(?:\{((?:[^"}\n]++|"(?:[^"\\\n]++|\\.)*+")*+)\})?[ \t]*([^\s]++)[ \t]*([^\r\n]*+)')
_LABEL: Final = re.compile(
    rb'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*=[ \t]*"((?:[^"\\]++|\\.)*+)"[ \t]*(?:,|$)', re.DOTALL
)
_NO_SAMPLE_LINES: Final = re.compile(rb"(?:[#\r][^\n]*+\n|\n)*+")  # whole lines without a sample
_ESCAPE: Final = re.compile(rb'\\([\\"n])')
_UNESCAPED: Final = {b"\\": b"\\", b'"': b'"', b"n": b"\n"}
_AMBIGUOUS: Final = (b"\n#", b"\n\n", b"\n\r", b"\n ", b"\n\t")  # the family may continue after such a line, or with it
_ENDS: Final = (b"\n# HELP ", b"\n# TYPE ", b"\n# EOF")  # the family ends before such a line
_NO_SAMPLE: Final = (b"#", b"\n", b"\r")
_AFTER_NAME: Final = frozenset((b"{", b" ", b"\t"))


class Malformed(ValueError):
    """Says that the page has the family, but that it cannot be read."""


class Selector(NamedTuple):
    """Selects series by a family and labels. A series matches if it has all `labels`; without labels every series matches."""

    name: str
    labels: tuple[tuple[bytes, bytes], ...] = ()

    def __str__(self) -> str:
        pairs = ",".join(f'{name.decode()}="{value.decode()}"' for name, value in self.labels)
        return f"{self.name}{{{pairs}}}" if pairs else self.name


def parse_selector(text: str) -> Selector:
    """Reads `name`, `name{label=value}` or `name{label="value",...}`. Raises ValueError."""
    whole = _SELECTOR.fullmatch(text)
    if whole is None:
        raise ValueError(f"'{text}' is not a metric: write name or name{{label=value}}")
    name, inside = whole[1], (whole[2] or "").strip()
    labels: dict[bytes, bytes] = {}
    at = 0
    while at < len(inside):
        pair = _MATCHER.match(inside, at)
        if pair is None:
            raise ValueError(f"'{text}': '{inside[at:]}' is not label=value; only = is supported")
        value = pair[2] if pair[2] is not None else pair[3]
        labels[pair[1].encode()] = value.encode()
        at = pair.end()
    return Selector(name, tuple(labels.items()))


def labels_of(text: bytes) -> dict[bytes, bytes]:
    """Returns the labels between the braces, unescaped. If a name occurs twice, the first one wins. Raises Malformed."""
    labels: dict[bytes, bytes] = {}
    at, end = 0, len(text.rstrip())
    while at < end:
        pair = _LABEL.match(text, at)
        if pair is None:
            raise Malformed(f"labels cannot be read at {_shown(text[at:])}")
        name, value = pair.groups()
        if b"\\" in value:
            value = _ESCAPE.sub(lambda escape: _UNESCAPED[escape[1]], value)
        labels.setdefault(name, value)
        at = pair.end()
    return labels


def number(token: bytes) -> float:
    """Reads a sample value. Raises Malformed, also for `1_0`, which only Python accepts."""
    try:
        if b"_" not in token:
            return float(token)
    except ValueError:
        pass
    raise Malformed(f"{_shown(token)} is not a number")


class Finder:
    """Finds the series of one selector on the pages of one server.

    If several series match, the one with the latest timestamp counts; without timestamps, the first. With `by_value` the one with the
    largest value counts (for info metrics that have a time as their value).
    """

    __slots__ = (
        "_at",
        "_by_value",
        "_labels",
        "_name_line",
        "_text",
        "_type_line",
        "selector",
    )

    def __init__(self, selector: Selector, *, by_value: bool = False) -> None:
        name = selector.name.encode()
        self.selector = selector
        self._by_value = by_value
        self._name_line = b"\n" + name
        self._type_line = b"# TYPE " + name + b" "
        self._text = b""
        self._labels = b""
        self._at = 0

    def find(self, page: bytes) -> tuple[bytes, float] | None:
        """Returns (text between the braces, value) of the series that counts; None: there is none. Raises Malformed."""
        if self._text:
            place = self._text, self._at, self._name_line, self._type_line
            found = recalled(page, *place) if recall is None else recall(page, *place)
            if found is not None:
                self._at = found[0]
                return self._labels, found[1]
        return self._search(page)

    def _search(self, page: bytes) -> tuple[bytes, float] | None:
        best: tuple[bytes, float] | None = None
        best_rank = 0.0
        wanted, by_value, first = self.selector.labels, self._by_value, True
        self._text = b""
        for start, series in self._series(page):
            text = series[1] or b""
            if not wanted or self._matches(text):
                value = number(series[2])
                rank = value if by_value else _timestamp(series[3])
                if best is None or rank > best_rank:
                    best, best_rank = (text, value), rank
                    if first and start > 0:
                        self._remember(page, start - 1, series.start(2))
                        self._labels = text
            first = False
        return best

    def _remember(self, page: bytes, at: int, value: int) -> None:
        """Keeps the text before the value at position `value`. The text begins with the newline at `at`, or with the newline before the
        family's TYPE line if that line is directly above."""
        above = page.rfind(b"\n", 0, at)
        typed = above >= 0 and page.startswith(self._type_line, above + 1)
        self._at = above if typed else at
        self._text = page[self._at : value]

    def _series(self, page: bytes) -> Iterator[tuple[int, re.Match[bytes]]]:
        """Yields (offset of the name, match) of each series of the family. Raises Malformed."""
        at = self._first(page)
        size = len(self._name_line) - 1
        limit = at + FAMILY_BYTES_MAX
        for _ in range(SERIES_MAX):
            if at < 0:
                return
            series = _SERIES.match(page, at + size, limit)
            if series is None or b"\n" in page[at : series.start(2)]:
                raise Malformed(f"the line cannot be read: {_shown(page[at : at + 200])}")
            if series.end() == limit:
                raise _too_long()
            yield at, series
            at = self._next(page, series.end(), limit)
        if at >= 0:
            raise Malformed(f"the family has more than {SERIES_MAX} series")

    def _first(self, page: bytes) -> int:
        name_line = self._name_line
        size = len(name_line)
        if page.startswith(name_line[1:]) and page[size - 1 : size] in _AFTER_NAME:
            return 0
        at = page.find(name_line)
        while at >= 0:
            if page[at + size : at + size + 1] in _AFTER_NAME:
                return at + 1
            at = page.find(name_line, at + 1)
        return -1

    def _next(self, page: bytes, end: int, limit: int) -> int:
        """Returns where the next series of the family starts, after the line that ends at `end`; -1: there is none."""
        line = page.find(b"\n", end) + 1
        if not line:
            return -1
        if page.startswith(_NO_SAMPLE, line):
            skipped = _NO_SAMPLE_LINES.match(page, line, limit).end()  # type: ignore[union-attr]  # it also matches nothing
            line = page.rfind(b"\n", 0, skipped) + 1  # Python 3.11 may return the middle of a truncated line
            if page.find(b"\n# HELP ", end, line) >= 0 or page.find(b"\n# TYPE ", end, line) >= 0:
                return -1
            if limit < len(page) and page.startswith(_NO_SAMPLE, line):
                raise _too_long()
        name_line = self._name_line
        after = line - 1 + len(name_line)
        return line if page.startswith(name_line, line - 1) and page[after : after + 1] in _AFTER_NAME else -1

    def _matches(self, text: bytes) -> bool:
        labels = labels_of(text)
        return all(labels.get(name) == value for name, value in self.selector.labels)


def recalled(page: bytes, text: bytes, at: int, name_line: bytes, type_line: bytes) -> tuple[int, float] | None:
    """Returns (position of `text`, value after it), if `text` stands at or near position `at` and its series is alone. Else None.

    `text` begins with the newline before the series, or before the TYPE line of its family. `name_line`: a newline and the name of the
    family. `type_line`: how the TYPE line of the family begins. A series is alone if it is certainly the only one of its family.
    """
    if not page.startswith(text, at):
        at = page.find(text, max(at - SHIFT_BYTES_MAX, 0), at + len(text) + SHIFT_BYTES_MAX)
    start = at + len(text)
    end = page.find(b"\n", start)
    if not 0 <= at < end or not _alone(page, at, end, text.startswith(type_line, 1), name_line, type_line):
        return None
    try:
        return at, number(page[start:end])
    except Malformed:
        return None  # a timestamp follows the value, or the value is not a number: the search finds out


def _alone(page: bytes, at: int, end: int, typed: bool, name_line: bytes, type_line: bytes) -> bool:
    """Returns whether the line between the newlines at `at` and `end` is certainly the only series of its family.

    `typed`: the TYPE line of the family precedes it, so no series of the family is above.
    """
    if page.startswith(name_line, end) or (page.startswith(_AMBIGUOUS, end) and not page.startswith(_ENDS, end)):
        return False
    if typed:
        return True
    above = page.rfind(b"\n", 0, at) + 1
    return page.startswith(type_line, above) or not page.startswith((name_line[1:], *_NO_SAMPLE), above)


def _timestamp(rest: bytes) -> float:
    """Returns the timestamp after a value; 0.0 if there is none, or an exemplar follows."""
    token = rest.split(None, 1)[:1]
    return number(token[0]) if token and not token[0].startswith(b"#") else 0.0


def _too_long() -> Malformed:
    return Malformed(f"the family has more than {FAMILY_BYTES_MAX} bytes")


def _shown(text: bytes) -> str:
    return repr(text[:60].decode("utf-8", "replace"))
