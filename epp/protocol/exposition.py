"""Scans a page in the Prometheus text format for single metric families, without parsing the rest.

A `Finder` is for one selector and for the pages of one server. Pages change little from scrape to scrape. So the finder
remembers where the family stands, and the text before its first value. On the next page, the same text is usually at the same
position. The value of a family with one series then costs no scan, and several series are read from this position on.

Otherwise the finder searches the whole page, because the series of a family may stand in several places. It also does so if the length of
the page has changed by more than changed digits can explain, because new series may then stand in another place. The finder skips comments,
blank lines, CRLF, exemplars and other families.

The finder does not judge values: it returns NaN and infinities. If a value is not a number, or labels cannot be read, it raises
`Malformed`.
"""

import functools
import re
from collections.abc import Mapping
from math import isfinite, nan
from typing import Final, NamedTuple

from compiled.calls import recall

# Limits for one family: lines, series with labels that are read, and bytes of these labels. A page with more would only cost time.
LINES_MAX: Final = 1 << 16
SERIES_MAX: Final = 16_384
FAMILY_BYTES_MAX: Final = 1 << 20
SHIFT_BYTES_MAX: Final = 256  # if a family stands further than this from its old position, the whole page is searched
DIGITS_MAX: Final = 24  # by how much the lengths of two pages can differ if only digits differ; a line is longer than this
INDENT_MAX: Final = 64  # blanks before a name
KEPT_LABELS: Final = 1024  # texts of at most KEPT_BYTES_MAX whose labels are kept
KEPT_BYTES_MAX: Final = 512

_SELECTOR: Final = re.compile(r"\s*([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{(.*)\})?\s*", re.DOTALL)
_MATCHER: Final = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*(?:"([^"]*)"|([^\s",{}=~]+))\s*(?:,|$)', re.DOTALL)
_SERIES: Final = re.compile(rb'[ \t]*(?:\{((?:[^"}\n]++|"(?:[^"\\\n]++|\\.)*+")*+)\})?[ \t]*([^\s]++)[ \t]*([^\r\n]*+)')
_LABEL: Final = re.compile(rb'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*=[ \t]*"((?:[^"\\]++|\\.)*+)"[ \t]*(?:,|$)', re.DOTALL)
_ESCAPE: Final = re.compile(rb'\\([\\"n])')
_UNESCAPED: Final = {b"\\": b"\\", b'"': b'"', b"n": b"\n"}
_AMBIGUOUS: Final = (b"\n#", b"\n\n", b"\n\r", b"\n ", b"\n\t")  # the family may continue after such a line, or with it
_ENDS: Final = (b"\n# HELP ", b"\n# TYPE ", b"\n# EOF")  # the family ends before such a line
_NEWLINE: Final = 0x0A
_BLANKS: Final = b" \t"
_AFTER_NAME: Final = frozenset((b"{", b" ", b"\t"))
_RANK: Final = re.compile(rb'[{, ]((?:engine|dp_rank)="[^"]*")')  # the label of a data-parallel rank


class Malformed(ValueError):
    """Says that the page has the family, but that the family cannot be read."""


class Selector(NamedTuple):
    """Selects series by a family and labels. A series matches if it has all `labels`; without labels every series matches."""

    name: str
    labels: tuple[tuple[bytes, bytes], ...] = ()

    def __str__(self) -> str:
        pairs = ",".join(f'{name.decode()}="{value.decode()}"' for name, value in self.labels)
        return f"{self.name}{{{pairs}}}" if pairs else self.name


def parse_selector(text: str, where: str) -> Selector:
    """Reads `name`, `name{label=value}` or `name{label="value",...}`. Raises ValueError. `where`: what the selector is, for errors."""
    whole = _SELECTOR.fullmatch(text)
    if whole is None:
        raise ValueError(f"{where}: '{text}' is not a metric: write name or name{{label=value}}")
    name, inside = whole[1], (whole[2] or "").strip()
    labels: dict[bytes, bytes] = {}
    at = 0
    while at < len(inside):
        pair = _MATCHER.match(inside, at)
        if pair is None:
            raise ValueError(f"{where}: '{text}': '{inside[at:]}' is not label=value; only = is supported")
        value = pair[2] if pair[2] is not None else pair[3]
        labels[pair[1].encode()] = value.encode()
        at = pair.end()
    return Selector(name, tuple(labels.items()))


def labels_of(text: bytes) -> Mapping[bytes, bytes]:
    """Returns the labels between the braces, unescaped. If a name occurs twice, the first one wins. Raises Malformed."""
    return _kept(text) if len(text) <= KEPT_BYTES_MAX else _parsed(text)


def _parsed(text: bytes) -> dict[bytes, bytes]:
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


_kept = functools.lru_cache(KEPT_LABELS)(_parsed)


def number(token: bytes) -> float:
    """Reads a sample value. Raises Malformed, also for `1_0`, which only Python accepts."""
    try:
        if b"_" not in token:
            return float(token)
    except ValueError:
        pass
    raise Malformed(f"{_shown(token)} is not a number")


class Sample(NamedTuple):
    """Holds one series. `text`: the text between the braces. `stamp`: the timestamp; 0.0 without one."""

    text: bytes
    value: float
    stamp: float


class Finder:
    """Finds the series of one selector on the pages of one server. `text`: the labels of the series that `find` finds, as text."""

    __slots__ = ("_at", "_before", "_bytes", "_name", "_name_at", "_name_line", "_run", "_single", "_type_line", "selector", "text")

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self.text = b""
        self._name = selector.name.encode()
        self._name_line = b"\n" + self._name
        self._type_line = b"# TYPE " + self._name + b" "
        line = re.escape(self._name) + rb"[{ \t][^\n]*+"
        self._run = re.compile(rb"%b(?:\n%b){0,%d}+" % (line, line, LINES_MAX))  # adjacent lines of the family
        self._before = b""  # the text from `_at` to the first value of the family; empty if no place is remembered
        self._bytes = 0  # the size of the previous page
        self._at = 0
        self._name_at = 0  # where the name stands in `_before`
        self._single = False  # whether the family has one series, and the selector matches it

    def find(self, page: bytes) -> float:
        """Returns the value of the family's only series if it stands at its last place. Else returns NaN; call `samples` then."""
        self._compare(len(page))
        if not self._single:
            return nan
        found = recall(page, self._before, self._at, self._name_line, self._type_line)
        if found is None:
            return nan
        self._at = found[0]
        return found[1]

    def forget(self) -> None:
        """Forgets where the family stands, so that the next page is searched as a whole."""
        self._before, self._single = b"", False

    def samples(self, page: bytes) -> list[Sample]:
        """Returns the series that the selector selects. Raises Malformed."""
        found = []
        for line in _few(self.lines(page)):
            series = self._series(line)
            text = series[1] or b""
            if self._selects(text):
                found.append(Sample(text, number(series[2]), _timestamp(series[3])))
        return found

    def newest(self, page: bytes) -> tuple[list[bytes], str]:
        """Returns, for each data-parallel rank, the text of the series with the largest value. Also says what is wrong with other series.

        This is for metrics with a time as value. Such a metric may have thousands of outdated series, so only the labels of the newest
        series are read. Raises Malformed.
        """
        lines = self.lines(page)
        wrong = ""
        try:
            times = [float(line.rpartition(b"}")[2]) for line in lines]
        except ValueError:  # a line has a timestamp, or no labels, or its value is no number
            times = [self._time(line) for line in lines]
        if not all(map(isfinite, times)):
            wrong = f"{next(time for time in times if not isfinite(time))} is not a time"
            kept = [(time, line) for time, line in zip(times, lines, strict=True) if isfinite(time)]
            times, lines = [time for time, _ in kept], [line for _, line in kept]
        if not lines:
            return [], wrong
        latest = max(times)
        newest = [line for time, line in zip(times, lines, strict=True) if time == latest]
        if _RANK.search(newest[0]) is not None:
            newest = _newest_by_rank(times, lines)
        return [self._series(line)[1] or b"" for line in _few(newest)], wrong

    def lines(self, page: bytes) -> list[bytes]:
        """Returns all lines of the family, including those without the selector's labels. Raises Malformed."""
        self._compare(len(page))
        near = self._near(page)
        if near >= 0 and (run := self._run.match(page, near)) is not None:
            lines, end = run[0].split(b"\n"), run.end()
            goes_on = page.startswith(_AMBIGUOUS, end) and not page.startswith(_ENDS, end)
            if len(lines) > 1 and not goes_on:  # the search says whether a single series can be found by `find`
                return lines
        return self._search(page)

    def _compare(self, size: int) -> None:
        """Forgets where the family stands if the length of the page has changed so much that it may have a new line."""
        if not -DIGITS_MAX <= size - self._bytes <= DIGITS_MAX:
            self.forget()
        self._bytes = size

    def _search(self, page: bytes) -> list[bytes]:
        self.forget()
        lines: list[bytes] = []
        first = at = self._next(page, 0)
        places = 0
        while at >= 0 and (run := self._run.match(page, at)) is not None:
            places += 1
            lines += run[0].split(b"\n")
            if len(lines) > LINES_MAX:
                raise Malformed(f"the family has more than {LINES_MAX} series")
            at = self._next(page, run.end())
        if places == 1 and first > 0 and page[first - 1] == _NEWLINE:
            self._remember(page, first, lines)
        return lines

    def _next(self, page: bytes, start: int) -> int:
        """Returns where the name begins on the next line of the family, at `start` or later; -1 without such a line."""
        size = len(self._name)
        at = page.find(self._name, start)
        while at >= 0:
            if page[at + size : at + size + 1] in _AFTER_NAME and (not at or page[at - 1] == _NEWLINE or _indented(page, at)):
                return at
            at = page.find(self._name, at + 1)
        return -1

    def _remember(self, page: bytes, line: int, lines: list[bytes]) -> None:
        """Remembers the text before the first value of the lines that begin at `line`. The text begins with the newline above, or
        with the newline before the family's TYPE line if that line is directly above.
        """
        series = _SERIES.match(lines[0], len(self._name))
        if series is None:
            return
        above = page.rfind(b"\n", 0, line - 1)
        typed = above >= 0 and page.startswith(self._type_line, above + 1)
        self._at = above if typed else line - 1
        self._name_at = line - self._at
        self._before = page[self._at : line + series.start(2)]
        self.text = series[1] or b""
        self._single = len(lines) == 1 and self._selects(self.text)

    def _near(self, page: bytes) -> int:
        """Returns where the family begins, if the remembered text is at or near its position; else -1."""
        before, at = self._before, self._at
        if not before:
            return -1
        if not page.startswith(before, at):
            at = page.find(before, max(at - SHIFT_BYTES_MAX, 0), at + len(before) + SHIFT_BYTES_MAX)
            if at < 0:
                return -1
        if self._name_at == 1 and page.startswith(self._name, page.rfind(b"\n", 0, at) + 1):
            return -1  # the page may have a new series above
        self._at = at
        return at + self._name_at

    def _series(self, line: bytes) -> re.Match[bytes]:
        series = _SERIES.fullmatch(line.rstrip(b"\r"), len(self._name))
        if series is None:
            raise Malformed(f"the line cannot be read: {_shown(line)}")
        return series

    def _time(self, line: bytes) -> float:
        try:
            return number(self._series(line)[2])
        except Malformed:
            return nan

    def _selects(self, text: bytes) -> bool:
        wanted = self.selector.labels
        if not wanted:
            return True
        labels = labels_of(text)
        return all(labels.get(name) == value for name, value in wanted)


def _indented(page: bytes, name: int) -> bool:
    """Returns whether only blanks stand before the name on its line."""
    before = page[max(name - INDENT_MAX - 1, 0) : name].rstrip(_BLANKS)
    return before.endswith(b"\n") if before else name <= INDENT_MAX


def _few(lines: list[bytes]) -> list[bytes]:
    """Returns these lines. Raises Malformed if they are too many to read their labels."""
    if len(lines) > SERIES_MAX:
        raise Malformed(f"the family has more than {SERIES_MAX} series")
    if sum(map(len, lines)) > FAMILY_BYTES_MAX:
        raise Malformed(f"the family has more than {FAMILY_BYTES_MAX} bytes")
    return lines


def _newest_by_rank(times: list[float], lines: list[bytes]) -> list[bytes]:
    ranks = [tuple(sorted(_RANK.findall(line))) for line in lines]
    latest: dict[tuple[bytes, ...], float] = {}
    for rank, time in zip(ranks, times, strict=True):
        latest[rank] = max(time, latest.get(rank, time))
    return [line for rank, time, line in zip(ranks, times, lines, strict=True) if time == latest[rank]]


def _timestamp(rest: bytes) -> float:
    """Returns the timestamp after a value; 0.0 if there is none, or an exemplar follows."""
    token = rest.split(None, 1)[:1]
    return number(token[0]) if token and not token[0].startswith(b"#") else 0.0


def _shown(text: bytes) -> str:
    return repr(text[:60].decode("utf-8", "replace"))
