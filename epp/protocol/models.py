"""The picker's own answer to GET /v1/models, which lists the models of several pools, in OpenAI's form.

One endpoint knows only the models of its own pool. So at a port of several pools, the picker answers in place of all endpoints.
"""

from collections.abc import Iterable, Mapping
from typing import Final

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


def listed(pools: Iterable[tuple[str, Iterable[str]]], created: int) -> bytes:
    """Returns the framed answer that lists the models and adapters of pools: (name of a pool, names of its models).

    If several pools have a model, it is listed once, as that of the first. `created`: Unix time in seconds, which clients expect.
    """
    owners: dict[str, str] = {}
    for pool, models in pools:
        for model in models:
            owners.setdefault(model, pool)
    data = [{"id": model, "object": "model", "created": created, "owned_by": owners[model]} for model in sorted(owners)]
    return codec.immediate_answer(OK, HEADERS, msgspec.json.encode({"object": "list", "data": data}))
