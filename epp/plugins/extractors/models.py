"""Reads the models that an endpoint serves from its answer to /v1/models."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from epp.data import Column
from epp.plugin import plugin
from epp.plugins.extractors._pages import MODELS, Extracted, ExtractError, PageExtractor

SERVED_MODELS: Column[frozenset[str]] = Column("served_models", frozenset)
MODELS_MAX = 1024
MODEL_NAME_BYTES_MAX = 512


class _Model(msgspec.Struct):
    id: str


class _Answer(msgspec.Struct):
    data: list[_Model]


_decoder = msgspec.json.Decoder(_Answer)


@plugin("models-data-extractor")
class ModelsExtractor(PageExtractor):
    """Emits the column `served_models`: the ids of the models and adapters that the endpoint lists."""

    pages = MODELS
    produces = (SERVED_MODELS,)

    def extraction(self, labels: Mapping[str, str], wanted: Sequence[Column[Any]], pod: str = "") -> "ServedModels":
        return ServedModels(wanted)


class ServedModels:
    """Reads the answers of one endpoint. While the answer stays the same, the set of ids stays the same object."""

    __slots__ = ("_names", "_page", "_zeros")

    def __init__(self, wanted: Sequence[Column[Any]]) -> None:
        self._zeros = (0.0,) * sum(column.type is not frozenset for column in wanted)
        self._page: bytes | None = None
        self._names: Mapping[str, frozenset[str]] = {}

    def extract(self, page: bytes) -> Extracted:
        """Returns the ids. Raises ExtractError if the page is rejected."""
        if page != self._page:
            try:
                listed = _decoder.decode(page).data
            except msgspec.MsgspecError as wrong:
                raise ExtractError(f"the list of models cannot be read: {wrong}") from None
            ids = frozenset(model.id for model in listed)
            if len(ids) > MODELS_MAX or any(len(name.encode()) > MODEL_NAME_BYTES_MAX for name in ids):
                raise ExtractError(f"more than {MODELS_MAX} models, or one with a name over {MODEL_NAME_BYTES_MAX} bytes")
            self._page, self._names = page, {SERVED_MODELS.name: ids}
        return Extracted(self._zeros, 0, self._names)
