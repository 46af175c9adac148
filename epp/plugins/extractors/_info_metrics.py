"""Reads the metrics that have their information in labels: the cache's configuration, and LoRA adapters."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Final

from epp.data import COUNT_MAX
from epp.plugins.extractors._ranks import APART, RANK
from epp.protocol.exposition import Finder, Malformed, Selector, labels_of

ADAPTERS_MAX: Final = 1024  # running or waiting adapters that are read for one endpoint
ADAPTER_NAME_BYTES_MAX: Final = 512
MAX_LORA_LABEL: Final = b"max_lora"
# vLLM's labels for how many tokens its cache holds, and in which units it matches prompts. Number and size of the blocks do not say this
# if layers have caches of different kinds.
TOKENS_LABEL: Final = b"kv_cache_size_tokens"
UNIT_LABEL: Final = b"prefix_match_unit"
BLOCK_SIZE_LABEL: Final = b"block_size"

Problems = dict[str, str]  # cause -> the text that names the metric and the rule


class Cache:
    """Reads size and number of the cache's blocks, and the tokens for which it has room.

    The values of different data-parallel ranks and models are added up. Of several series that differ in other labels, the largest is used.
    """

    __slots__ = ("_count_label", "_counts", "_finder", "_lines", "_places", "_problems", "_size_label")

    def __init__(self, selector: Selector, labels: tuple[bytes, bytes], places: tuple[int, int, int, int]) -> None:
        """`labels`: the labels of block size and number of blocks; empty if not read. `places`: the indices of block size, number of
        blocks, tokens and ranks among the values; -1 if not wanted.
        """
        self._finder = Finder(selector)
        self._size_label, self._count_label = labels
        self._places = places
        self._lines: list[bytes] = []
        self._counts: list[tuple[int, float]] = []
        self._problems: Problems = {}

    def read(self, page: bytes, problems: Problems) -> Sequence[tuple[int, float]]:
        """Returns (place, value) of each value that the page has. Adds unreadable values to `problems`."""
        alone = self._finder.find(page)
        if alone != alone:  # NaN
            try:
                lines = self._finder.lines(page)
                if lines != self._lines:
                    self._read([sample.text for sample in self._finder.samples(page)])
                    self._lines = lines
            except Malformed as wrong:
                self._finder.forget()
                problems[str(self._finder.selector)] = f"{self._finder.selector}: {wrong}"
                return ()
        if self._problems:
            problems.update(self._problems)
        return self._counts

    def _read(self, texts: Sequence[bytes]) -> None:
        self._problems = {}
        by_rank: dict[tuple[bytes | None, ...], tuple[float, float, float]] = {}
        for text in texts:
            try:
                labels = labels_of(text)
            except Malformed as wrong:
                self._problems[str(self._finder.selector)] = f"{self._finder.selector}: {wrong}"
                continue
            rank = tuple(labels.get(label) for label in APART)
            sizes = self._sizes(labels)
            by_rank[rank] = max(by_rank.get(rank, sizes), sizes)
        ranks = list(by_rank.values())
        tokens, counts = ([rank[at] for rank in ranks if rank[at] >= 0.0] for at in (0, 1))
        values = (
            max((rank[2] for rank in ranks), default=-1.0),
            sum(counts) if counts else -1.0,
            sum(tokens) if tokens else -1.0,
            float(len({rank[: len(RANK)] for rank in by_rank})) if by_rank else -1.0,
        )
        self._counts = [
            (place, min(value, COUNT_MAX)) for place, value in zip(self._places, values, strict=True) if place >= 0 and value >= 0.0
        ]

    def _sizes(self, labels: Mapping[bytes, bytes]) -> tuple[float, float, float]:
        """Returns the cache's tokens, its number of blocks, and the tokens per unit of a match; -1 for a number that is not known."""
        size, count = (self._count(labels, label) for label in (self._size_label, self._count_label))
        tokens = self._count(labels, TOKENS_LABEL)
        if tokens < 0.0 and size >= 0.0 and count >= 0.0:
            tokens = min(size * count, COUNT_MAX)
        unit = self._count(labels, UNIT_LABEL) if self._size_label == BLOCK_SIZE_LABEL else -1.0
        return tokens, count, unit if unit > 0.0 else size

    def _count(self, labels: Mapping[bytes, bytes], label: bytes) -> float:
        return count(labels, label, self._finder.selector, self._problems)


class Adapters:
    """Reads the LoRA adapters that a server runs and that requests wait for. For each data-parallel rank, the newest series is used.

    While the server reports the same text, the sets stay the same objects. `most`: how many adapters the server has room for; -1 if not
    known.
    """

    __slots__ = ("_finder", "_labels", "_names", "_none", "_problems", "_texts", "most")

    def __init__(self, selector: Selector, labels: Mapping[str, bytes]) -> None:
        """`labels`: wanted column -> label with the names of its adapters."""
        self._finder = Finder(selector)
        self._labels = labels
        self._none: Mapping[str, frozenset[str]] = dict.fromkeys(labels, frozenset())
        self._texts: list[bytes] = []
        self._problems: Problems = {}
        self._names: Mapping[str, frozenset[str]] = self._none
        self.most = -1.0

    def read(self, page: bytes, problems: Problems) -> Mapping[str, frozenset[str]]:
        """Returns column -> the names of adapters. Adds unreadable values to `problems`."""
        if isfinite(self._finder.find(page)):
            if self._problems:
                problems.update(self._problems)
            return self._names
        selector = self._finder.selector
        try:
            texts, wrong = self._finder.newest(page)
        except Malformed as failure:
            texts, wrong = [], str(failure)
        if wrong:
            self._finder.forget()
            problems[str(selector)] = f"{selector}: {wrong}"
        if texts != self._texts:
            self._texts, self._problems = texts, {}
            self._read(texts)
        problems.update(self._problems)
        return self._names

    def _read(self, texts: Sequence[bytes]) -> None:
        selector = self._finder.selector
        found: dict[str, set[str]] = {column: set() for column in self._labels}
        most: dict[tuple[bytes | None, ...], float] = {}
        for text in texts:
            try:
                labels = labels_of(text)
            except Malformed as wrong:
                self._problems[str(selector)] = f"{selector}: {wrong}"
                continue
            for column, label in self._labels.items():
                found[column].update(self._adapters(labels.get(label, b"")))
            rank = tuple(labels.get(label) for label in APART)
            most[rank] = max(most.get(rank, -1.0), count(labels, MAX_LORA_LABEL, selector, self._problems))
        if any(len(adapters) > ADAPTERS_MAX for adapters in found.values()):
            self._problems[f"{selector} adapters"] = f"{selector}: more than {ADAPTERS_MAX} adapters"
            found = {column: set() for column in self._labels}
        self._names = {column: frozenset(adapters) for column, adapters in found.items()} if texts else self._none
        known = [number for number in most.values() if number >= 0.0]
        self.most = min(sum(known), COUNT_MAX) if known else -1.0

    def _adapters(self, text: bytes) -> list[str]:
        names = [name for part in text.split(b",") if (name := part.strip())]
        if any(len(name) > ADAPTER_NAME_BYTES_MAX for name in names):
            selector = self._finder.selector
            self._problems[f"{selector} name"] = f"{selector}: an adapter has a name over {ADAPTER_NAME_BYTES_MAX} bytes"
        return [name.decode("utf-8", "replace") for name in names if len(name) <= ADAPTER_NAME_BYTES_MAX]


def count(labels: Mapping[bytes, bytes], label: bytes, selector: Selector, problems: Problems) -> float:
    """Returns the label's value as a count; -1 if the label is missing, empty or `None`, or no count (noted in `problems`)."""
    text = labels.get(label, b"").strip()
    if text in (b"", b"None"):
        return -1.0
    if text.isdigit() and len(text) <= len(str(int(COUNT_MAX))):
        return float(text)
    shown = text[:60].decode("utf-8", "replace")
    problems[f"{selector} {label.decode()}"] = f"{selector}: label {label.decode()}='{shown}' is not a count of 0 or more"
    return -1.0
