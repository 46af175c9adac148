"""Filters decide which candidates stay."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from compiled.classes import subclassed
from epp.candidates import Candidates, EndpointList, Mask
from epp.plugin import Filter, Profile
from epp.request import Request


@subclassed
class LabelFilter(Filter):
    """Base class of filters that decide by labels alone. Calls `matches` once per endpoint of an endpoint list, and keeps the results."""

    def __init__(self, name: str, params: Any) -> None:
        super().__init__(name, params)
        self._endpoint_list = EndpointList(())
        self._mask: Mask = np.zeros(0, dtype=bool)

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Returns whether an endpoint with these labels stays."""
        raise NotImplementedError

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        endpoint_list = candidates.snapshot.endpoint_list
        if endpoint_list is not self._endpoint_list:
            self._mask = np.array([self.matches(endpoint.labels) for endpoint in endpoint_list.endpoints], dtype=bool)
            self._mask.flags.writeable = False
            self._endpoint_list = endpoint_list
        return self._mask if candidates.rows is None else self._mask[candidates.rows]
