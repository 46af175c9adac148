"""Reads the utilization of an endpoint's GPUs from the page of a DCGM exporter."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from epp.data import Column
from epp.plugin import plugin
from epp.plugins.extractors._pages import Extracted, ExtractError, PageExtractor
from epp.protocol.exposition import Malformed, labels_of, number

METRIC = b"DCGM_FI_DEV_GPU_UTIL"
POD = b"pod"
GPU_UTILIZATION = Column("GPUUtilization", float)
SERIES_MAX = 4096  # series that are read of one page


@plugin("dcgm-extractor")
class DcgmExtractor(PageExtractor):
    """Emits the attribute `GPUUtilization`: the highest utilization of the endpoint's GPUs, from 0 to 1.

    The page of a node has the GPUs of all its pods. A sample with the label `pod` counts only for the pod that the label names, a sample
    without it for every endpoint.
    """

    produces = (GPU_UTILIZATION,)

    def extraction(self, labels: Mapping[str, str], wanted: Sequence[Column[Any]], pod: str = "") -> "Utilization":
        return Utilization(wanted, pod)


class Utilization:
    """Reads the pages of one endpoint's exporter. `pod`: the name of the endpoint's pod; empty: samples of all pods count."""

    __slots__ = ("_at", "_pod", "_zeros")

    def __init__(self, wanted: Sequence[Column[Any]], pod: str) -> None:
        numeric = [column.name for column in wanted if column.type is not frozenset]
        self._at = numeric.index(GPU_UTILIZATION.name) if GPU_UTILIZATION.name in numeric else -1
        self._zeros = (0.0,) * len(numeric)
        self._pod = pod.encode()

    def extract(self, page: bytes) -> Extracted:
        """Returns the page's values. Raises ExtractError if the page is rejected."""
        found = [value for labels, value in _series(page) if self._mine(labels)]
        if not found:
            pod = f" of pod '{self._pod.decode()}'" if self._pod else ""
            raise ExtractError(f"{METRIC.decode()}: the page has no such series{pod}")
        if self._at < 0:
            return Extracted(self._zeros, 0, {})
        values = list(self._zeros)
        values[self._at] = min(max(*found, 0.0) / 100.0, 1.0)
        return Extracted(tuple(values), 1 << self._at, {})

    def _mine(self, labels: Mapping[bytes, bytes]) -> bool:
        pod = labels.get(POD)
        return not self._pod or pod is None or pod == self._pod


def _series(page: bytes) -> list[tuple[Mapping[bytes, bytes], float]]:
    """Returns labels and value of each series of METRIC. Raises ExtractError."""
    if page[-1:] != b"\n":
        raise ExtractError("the page does not end with a newline: it is empty or truncated")
    found: list[tuple[Mapping[bytes, bytes], float]] = []
    at = 0 if page.startswith(METRIC) else page.find(b"\n" + METRIC) + 1
    while page.startswith(METRIC, at):
        if len(found) == SERIES_MAX:
            raise ExtractError(f"{METRIC.decode()}: more than {SERIES_MAX} series")
        end = page.index(b"\n", at)
        line = page[at + len(METRIC) : end]
        if line[:1] in (b"{", b" ", b"\t"):
            found.append(_sample(line))
        at = page.find(b"\n" + METRIC, end) + 1
        if not at:
            break
    return found


def _sample(line: bytes) -> tuple[Mapping[bytes, bytes], float]:
    """Parses what follows the metric's name in a line, `{labels} value [timestamp]`. Returns labels and value. Raises ExtractError."""
    text, brace, rest = line.rpartition(b"}")
    try:
        labels = labels_of(text.lstrip()[1:]) if brace else {}
        value = number((rest.split() or (b"",))[0])
    except Malformed as wrong:
        raise ExtractError(f"{METRIC.decode()}: {wrong}") from None
    if not isfinite(value):
        raise ExtractError(f"{METRIC.decode()}: {value} is not a finite number")
    return labels, value
