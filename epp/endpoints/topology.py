"""Says how close endpoints are to each other: same host, rack, zone or region. The labels of an endpoint say where it runs."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from epp.candidates import Candidates, Endpoint, EndpointList

LEVELS: Final = ("host", "rack", "zone", "region")  # tightest first
APART: Final = len(LEVELS)  # the level of endpoints that do not even share a region
EXTRACTOR: Final = "topology-extractor"
HOST_LABEL: Final = "kubernetes.io/hostname"
LABELS: Final = (HOST_LABEL, "topology.kubernetes.io/rack", "topology.kubernetes.io/zone", "topology.kubernetes.io/region")


class NamesPlaces:
    """Base class of plugins with the parameter `labels`: the names of the labels for host, rack, zone and region, in this order."""

    labels: tuple[str, str, str, str]


class Places:
    """Holds the places of all endpoints of a list. If an endpoint lacks the label of a level, it shares this level with no other."""

    def __init__(self, labels: Sequence[str] = LABELS) -> None:
        self.labels = tuple(labels)
        self._endpoint_list = EndpointList(())
        self._numbers: list[dict[str, int]] = []  # per level: value of the label -> its number, from 1
        # Per level: the number of each endpoint's label value; 0 if the endpoint lacks the label.
        self._places: list[NDArray[np.intp]] = []

    @classmethod
    def of(cls, plugins: Sequence[object]) -> "Places":
        """Returns the places by the labels that the first `NamesPlaces` among the plugins names, or else by the default labels."""
        named = next((plugin for plugin in plugins if isinstance(plugin, NamesPlaces)), None)
        return cls(LABELS if named is None else named.labels)

    @classmethod
    def named(cls, plugin: object) -> "Places":
        """Returns the places according to the labels that this plugin names. Raises ValueError if it is not a `NamesPlaces`."""
        if not isinstance(plugin, NamesPlaces):
            raise ValueError(f"topologyProducerName: this plugin names no labels of places; name a {EXTRACTOR}")
        return cls(plugin.labels)

    def level(self, peer: Endpoint, candidates: Candidates) -> NDArray[np.intp]:
        """Returns the tightest level that each candidate shares with `peer`: an index into LEVELS or APART, shape (candidates,)."""
        endpoint_list = candidates.snapshot.endpoint_list
        if endpoint_list is not self._endpoint_list:
            self._follow(endpoint_list)
        levels = np.full(len(endpoint_list.endpoints), APART)
        for level in range(APART - 1, -1, -1):
            value = self._value(level, peer.labels)
            number = self._numbers[level].get(value) if value else None
            if number is not None:
                levels[self._places[level] == number] = level
        return levels if candidates.rows is None else levels[candidates.rows]

    def _value(self, level: int, labels: Mapping[str, str]) -> str:
        return labels.get(self.labels[level], "") or (labels.get(HOST_LABEL, "") if level == 0 else "")

    def _follow(self, endpoint_list: EndpointList) -> None:
        self._numbers = [{} for _ in LEVELS]
        self._places = []
        for level, numbers in enumerate(self._numbers):
            values = [self._value(level, endpoint.labels) for endpoint in endpoint_list.endpoints]
            self._places.append(np.array([numbers.setdefault(v, len(numbers) + 1) if v else 0 for v in values], dtype=np.intp))
        self._endpoint_list = endpoint_list
