"""The picker's own answer to GET /v1/models, which lists the models of several pools, in OpenAI's form.

One endpoint knows only the models of its own pool. So at a port of several pools, the picker answers instead of an endpoint.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from epp.protocol import codec
from epp.protocol.refusals import CONTENT_TYPE

PATH: Final = "/v1/models"
HEADERS: Final[Mapping[str, str]] = {CONTENT_TYPE: "application/json"}
OK: Final = 200
_PATH: Final = PATH.encode()


def asks_for_models(headers: codec.Headers) -> bool:
    """Returns whether these are the headers of a request for the list of models."""
    if not headers.mentions(_PATH) or headers.get(":method") != "GET":
        return False
    return (headers.get(":path") or "").partition("?")[0].removesuffix("/").endswith(PATH)


class Model(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """A model or an adapter that an endpoint lists. `parent`: the model that an adapter adapts. "" and 0 mean that it is not known."""

    id: str
    root: str = ""
    parent: str = ""
    max_model_len: int = 0


class Listed(NamedTuple):
    """A model with the name of its pool."""

    pool: str
    model: Model


def listed(models: Iterable[Listed], created: int) -> bytes:
    """Returns the framed answer that lists models and adapters, sorted by their names.

    If several pools have a model, it is listed once, with the first pool. `created`: Unix time in seconds, which clients expect.
    """
    found: dict[str, Listed] = {}
    for each in models:
        found.setdefault(each.model.id, each)
    data = [_entry(found[name], created) for name in sorted(found)]
    return codec.immediate_answer(OK, HEADERS, msgspec.json.encode({"object": "list", "data": data}))


def _entry(listed: Listed, created: int) -> dict[str, Any]:
    model = listed.model
    entry: dict[str, Any] = {"id": model.id, "object": "model", "created": created, "owned_by": listed.pool}
    known = {"root": model.root, "parent": model.parent, "max_model_len": model.max_model_len}
    return entry | {field: value for field, value in known.items() if value}
