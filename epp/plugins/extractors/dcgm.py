"""Reads the utilization of an endpoint's GPUs from the page of a DCGM exporter."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from epp.data import Column
from epp.plugin import plugin
from epp.plugins.extractors._pages import Extracted, ExtractError, PageExtractor, check_whole
from epp.protocol.exposition import Finder, Malformed, Selector, labels_of

METRIC = Selector("DCGM_FI_DEV_GPU_UTIL")
POD = b"pod"
GPU_UTILIZATION = Column("GPUUtilization", float)


@plugin("dcgm-extractor")
class DcgmExtractor(PageExtractor):
    """Emits the attribute `GPUUtilization`: the highest utilization of the endpoint's GPUs, from 0 to 1.

    The page of a node has the GPUs of all pods of the node. A sample with the label `pod` is used only for the pod that the label names; a
    sample without this label is used for every endpoint. A GPU is ignored if its value is not a finite number.
    """

    produces = (GPU_UTILIZATION,)

    def extraction(self, labels: Mapping[str, str], wanted: Sequence[Column[Any]], pod: str = "") -> "Utilization":
        return Utilization(wanted, pod)


class Utilization:
    """Reads the pages of one endpoint's exporter. `pod`: the name of the endpoint's pod; if empty, samples of all pods are used."""

    __slots__ = ("_at", "_finder", "_pod", "_zeros")

    def __init__(self, wanted: Sequence[Column[Any]], pod: str) -> None:
        numeric = [column.name for column in wanted if column.type is not frozenset]
        self._at = numeric.index(GPU_UTILIZATION.name) if GPU_UTILIZATION.name in numeric else -1
        self._zeros = (0.0,) * len(numeric)
        self._pod = pod.encode()
        self._finder = Finder(METRIC)

    def extract(self, page: bytes) -> Extracted:
        """Returns the page's values. Raises ExtractError if the page is rejected."""
        check_whole(page)
        try:
            mine = [sample.value for sample in self._finder.samples(page) if self._mine(labels_of(sample.text))]
        except Malformed as wrong:
            raise ExtractError(f"{METRIC}: {wrong}") from None
        found = [value for value in mine if isfinite(value)]
        problems = {str(METRIC): f"{METRIC}: a value is not a finite number"} if len(found) < len(mine) else {}
        if not found:
            pod = f" of pod '{self._pod.decode()}'" if self._pod else ""
            raise ExtractError(problems.get(str(METRIC)) or f"{METRIC}: the page has no such series{pod}")
        if self._at < 0:
            return Extracted(self._zeros, 0, {}, problems)
        values = list(self._zeros)
        values[self._at] = min(max(*found, 0.0) / 100.0, 1.0)
        return Extracted(tuple(values), 1 << self._at, {}, problems)

    def _mine(self, labels: Mapping[bytes, bytes]) -> bool:
        pod = labels.get(POD)
        return not self._pod or pod is None or pod == self._pod
