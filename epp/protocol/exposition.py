"""A bytes scan of a Prometheus text page for single families; the rest is never looked at.

A `Finder` belongs to one selector and to the pages of one server. Pages change little from scrape
to scrape, so it remembers the text in front of the value and where that text stood: on the next
page it usually stands there again, and a value costs no scan. The remembered series is taken only
while it is alone in its family; otherwise all of the family's series are looked at again.

What is relied on: the series of a family follow each other, and its TYPE line, if any, stands
before the first of them. The format demands both. Comments, blank lines, CRLF, exemplars and
families that nobody asked for are passed over.

What this does not do: judge values. NaN and infinities are handed on; a text that is no number, or
labels that cannot be read, are `Malformed`.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

SERIES_MAX = 16_384  # of one family; more is a page that only costs time
FAMILY_BYTES_MAX = 1 << 20  # from its first series to its last
SHIFT_BYTES_MAX = 256  # how far a family moves between two pages without a search of the whole page

_SELECTOR = re.compile(r"\s*([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{(.*)\})?\s*", re.DOTALL)
_MATCHER = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*(?:"([^"]*)"|([^\s",{}=~]+))\s*(?:,|$)', re.DOTALL)
_SERIES = re.compile(rb'[ \t]*(?:\{((?:[^"}\n]++|"(?:[^"\\\n]++|\\.)*+")*+)\})?[ \t]*([^\s]++)[ \t]*([^\r\n]*+)')
_LABEL = re.compile(rb'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*=[ \t]*"((?:[^"\\]++|\\.)*+)"[ \t]*(?:,|$)', re.DOTALL)
_PASSED = re.compile(rb"(?:[#\r][^\n]*+\n|\n)*+")  # whole lines that say nothing
_ESCAPE = re.compile(rb'\\([\\"n])')
_UNESCAPED = {b"\\": b"\\", b'"': b'"', b"n": b"\n"}
_AMBIGUOUS = (b"\n#", b"\n\n", b"\n\r", b"\n ", b"\n\t")  # the family may go on behind such a line, or with it
_ENDS = (b"\n# HELP ", b"\n# TYPE ", b"\n# EOF")  # here it does not
_SAYS_NOTHING = (b"#", b"\n", b"\r")
_BEHIND_NAME = frozenset((b"{", b" ", b"\t"))


class Malformed(ValueError):
    """The family stands on the page but cannot be read."""


class Selector(NamedTuple):
    """Which series of which family: all `labels` must be equal; none = every series."""

    name: str
    labels: tuple[tuple[bytes, bytes], ...] = ()

    def __str__(self) -> str:
        pairs = ",".join(f'{name.decode()}="{value.decode()}"' for name, value in self.labels)
        return f"{self.name}{{{pairs}}}" if pairs else self.name


def parse_selector(text: str) -> Selector:
    """`name`, `name{label=value}` or `name{label="value",...}`; ValueError says what is wrong."""
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
    """The labels between the braces, unescaped; of a name given twice the first counts."""
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
    """A sample value; what only Python takes for a number is refused."""
    try:
        if b"_" not in token:
            return float(token)
    except ValueError:
        pass
    raise Malformed(f"{_shown(token)} is not a number")


class Finder:
    """One selector on the pages of one server.

    Of several matching series the one with the highest timestamp counts, else the first; with
    `by_value` the one with the largest value (info metrics whose value is a time).
    """

    __slots__ = (
        "_at",
        "_by_value",
        "_labels",
        "_name_line",
        "_not_above",
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
        self._not_above = (name, b"#", b"\n", b"\r")
        self._text = b""
        self._labels = b""
        self._at = 0

    def find(self, page: bytes) -> tuple[bytes, float] | None:
        """The series that counts, as (text between its braces, value); None = no such series."""
        text, at = self._text, self._at
        if text:
            if not page.startswith(text, at):
                low, high = max(at - SHIFT_BYTES_MAX, 0), at + len(text) + SHIFT_BYTES_MAX
                self._at = at = page.find(text, low, high)
            start = at + len(text)
            end = page.find(b"\n", start)
            if 0 <= at < end and self._alone(page, at, end):
                token = page[start:end]
                try:
                    if b"_" not in token:
                        return self._labels, float(token)
                except ValueError:
                    pass  # a timestamp behind the value, or no number: the search tells them apart
        return self._search(page)

    def _alone(self, page: bytes, at: int, end: int) -> bool:
        """Is the line between the newlines at `at` and `end` surely the family's only series?"""
        above = page.rfind(b"\n", 0, at) + 1
        if page.startswith(self._name_line, end) or (
            page.startswith(_AMBIGUOUS, end) and not page.startswith(_ENDS, end)
        ):
            return False
        return page.startswith(self._type_line, above) or not page.startswith(self._not_above, above)

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
                        self._at = start - 1
                        self._text = page[start - 1 : series.start(2)]
                        self._labels = text
            first = False
        return best

    def _series(self, page: bytes) -> Iterator[tuple[int, re.Match[bytes]]]:
        """The lines of the family, each with the offset at which its name starts."""
        at = self._first(page)
        size = len(self._name_line) - 1
        limit = at + FAMILY_BYTES_MAX
        for _ in range(SERIES_MAX):
            if at < 0:
                return
            series = _SERIES.match(page, at + size, limit)
            if series is None or b"\n" in page[at : series.start(2)]:
                raise Malformed(f"its line cannot be read: {_shown(page[at : at + 200])}")
            if series.end() == limit:
                raise _too_long()
            yield at, series
            at = self._next(page, series.end(), limit)
        if at >= 0:
            raise Malformed(f"it has more than {SERIES_MAX} series")

    def _first(self, page: bytes) -> int:
        name_line = self._name_line
        size = len(name_line)
        if page.startswith(name_line[1:]) and page[size - 1 : size] in _BEHIND_NAME:
            return 0
        at = page.find(name_line)
        while at >= 0:
            if page[at + size : at + size + 1] in _BEHIND_NAME:
                return at + 1
            at = page.find(name_line, at + 1)
        return -1

    def _next(self, page: bytes, end: int, limit: int) -> int:
        """Where the next series of this family starts, from the end of a line; -1 = no more."""
        line = page.find(b"\n", end) + 1
        if not line:
            return -1
        if page.startswith(_SAYS_NOTHING, line):
            passed = _PASSED.match(page, line, limit).end()  # type: ignore[union-attr]  # it matches nothing, too
            line = page.rfind(b"\n", 0, passed) + 1  # Python 3.11 may say the middle of a line that is cut off
            if page.find(b"\n# HELP ", end, line) >= 0 or page.find(b"\n# TYPE ", end, line) >= 0:
                return -1
            if limit < len(page) and page.startswith(_SAYS_NOTHING, line):
                raise _too_long()
        name_line = self._name_line
        after = line - 1 + len(name_line)
        return line if page.startswith(name_line, line - 1) and page[after : after + 1] in _BEHIND_NAME else -1

    def _matches(self, text: bytes) -> bool:
        labels = labels_of(text)
        return all(labels.get(name) == value for name, value in self.selector.labels)


def _timestamp(rest: bytes) -> float:
    """What stands behind the value: nothing, a timestamp, or an exemplar."""
    token = rest.split(None, 1)[:1]
    return number(token[0]) if token and not token[0].startswith(b"#") else 0.0


def _too_long() -> Malformed:
    return Malformed(f"it has more than {FAMILY_BYTES_MAX} bytes")


def _shown(text: bytes) -> str:
    return repr(text[:60].decode("utf-8", "replace"))
