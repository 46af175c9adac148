"""Prefer endpoints with a label that equals a request header."""

from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from epp.candidates import Candidates, EndpointList, Scores
from epp.plugin import Profile, Scorer, plugin
from epp.request import Request

Name = Annotated[str, msgspec.Meta(min_length=1)]


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which header and label are compared.

    header_name: The request header, in any case.
    label_key: The label of endpoints.
    """

    header_name: Name
    label_key: Name


@plugin("header-label-affinity-scorer")
class HeaderLabel(Scorer):
    """Scores 1 for endpoints with a label that equals a request header, 0 for others. Without the header all score 0."""

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._header = params.header_name.lower()
        self.reads_headers = (self._header,)
        self._label = params.label_key
        self._endpoint_list = EndpointList(())
        self._rows: dict[str, NDArray[np.intp]] = {}  # label value -> rows of the endpoint list

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        wanted = request.headers.get(self._header)
        if not wanted:
            return None
        endpoint_list = candidates.snapshot.endpoint_list
        if endpoint_list is not self._endpoint_list:
            self._follow(endpoint_list)
        rows = self._rows.get(wanted)
        if rows is None:
            return None
        scores = np.zeros(len(endpoint_list.endpoints))
        scores[rows] = 1.0
        return candidates.narrow(scores)

    def _follow(self, endpoint_list: EndpointList) -> None:
        rows: dict[str, list[int]] = {}
        for row, endpoint in enumerate(endpoint_list.endpoints):
            if self._label in endpoint.labels:
                rows.setdefault(endpoint.labels[self._label], []).append(row)
        self._rows = {value: np.array(at, dtype=np.intp) for value, at in rows.items()}
        self._endpoint_list = endpoint_list
