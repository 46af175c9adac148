"""Reads the models that an endpoint serves from its answer to /v1/models."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from epp.data import Column
from epp.errors import UNREADABLE
from epp.plugin import plugin
from epp.plugins.extractors._pages import MODELS, Extracted, ExtractError, PageExtractor
from epp.protocol.models import Model

SERVED_MODELS: Column[frozenset[str]] = Column("served_models", frozenset)
MODELS_MAX = 1024
# vLLM lists a model with an id of its own and one of its permission.
IDS_MAX = 4 * MODELS_MAX
MODEL_NAME_BYTES_MAX = 512
VALUE_BYTES_MAX = 6 * MODEL_NAME_BYTES_MAX + 2  # a name in JSON takes up to six bytes for each of its own
EMPTY = msgspec.Raw()
COUNT_MAX = 1 << 53  # larger numbers are not exact in JSON


class _Model(msgspec.Struct):
    id: str
    root: msgspec.Raw = EMPTY
    parent: msgspec.Raw = EMPTY
    max_model_len: msgspec.Raw = EMPTY


class _Answer(msgspec.Struct):
    data: list[_Model]


_decoder = msgspec.json.Decoder(_Answer)
_value = msgspec.json.Decoder(str | int | float | bool | None).decode


def models_of(page: bytes) -> list[Model]:
    """Returns the models on a page, without fields of an unexpected type. Raises ExtractError if the page is rejected."""
    if page.count(b'"id"') > IDS_MAX:
        raise ExtractError(f"more than {IDS_MAX} ids, for at most {MODELS_MAX} models")
    try:
        found = _decoder.decode(page).data
    except UNREADABLE as wrong:
        raise ExtractError(f"the list of models cannot be read: {wrong}") from None
    if len(found) > MODELS_MAX or any(len(model.id.encode()) > MODEL_NAME_BYTES_MAX for model in found):
        raise ExtractError(f"more than {MODELS_MAX} models, or one with a name over {MODEL_NAME_BYTES_MAX} bytes")
    return [Model(model.id, _name(model.root), _name(model.parent), _count(model.max_model_len)) for model in found]


def _scalar(raw: msgspec.Raw) -> object:
    """Decodes a single value; None if it is too long, or a list or an object, which the event loop would wait for."""
    if not 0 < len(memoryview(raw)) <= VALUE_BYTES_MAX:
        return None
    try:
        return _value(raw)
    except UNREADABLE:
        return None


def _name(raw: msgspec.Raw) -> str:
    value = _scalar(raw)
    return value if isinstance(value, str) and len(value.encode()) <= MODEL_NAME_BYTES_MAX else ""


def _count(raw: msgspec.Raw) -> int:
    value = _scalar(raw)
    return value if type(value) is int and 0 < value < COUNT_MAX else 0


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
            ids = frozenset(model.id for model in models_of(page))
            self._page, self._names = page, {SERVED_MODELS.name: ids}
        return Extracted(self._zeros, 0, self._names)
