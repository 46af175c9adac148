"""A model that is asked for by another name: by that of a header, or by what rules say.

The name of a header holds for who sends it; a rule (`rewrite`) holds for all who ask for a model, and wins. What is hidden
from everybody (`--trust-client-headers`) is hidden here too. `epp.protocol.rewrite` knows how bodies are changed.
"""

from collections.abc import Callable
from typing import Final

from epp import client_headers
from epp.errors import Cause, Refused
from epp.pipeline import ParseCall
from epp.plugin import Parser
from epp.protocol import codec
from epp.protocol.rewrite import ModelRestorer, with_model
from epp.protocol.usage import ANSWER
from epp.request import Request

MENTIONED: Final = b"-model-name-rewrite"  # how both names of the header end
CONTENT_ENCODING: Final = "content-encoding"
UNSIZED: Final = ("content-length",)  # of an answer whose length changes on its way


def parse_renamed(
    rewrite: Callable[[str], str | None] | None,
    parser: Parser,
    parse: ParseCall,
    request: Request,
    body: bytes | memoryview,
    *,
    header: bool = True,
) -> tuple[bytes, ModelRestorer] | None:
    """Parses; then the body to send on instead, and who restores the answer. None: the name stays. Raises Refused.

    `header`: whether a header may name a model; to look for one that is not there costs more than all the rest."""
    try:
        parse(request, request.path, body)
    except Refused as refused:
        if refused.cause is not Cause.MODEL_MISSING or not parser.names_model:
            raise
    answer = request[ANSWER]
    if not parser.names_model or (answer is not None and answer.skip):
        return None
    wanted = client_headers.model_rewrite(request.headers) if header else None
    target = request.model if wanted is None else wanted
    if rewrite is not None:
        target = rewrite(request.model) or target
    if not target:
        raise Refused(Cause.MODEL_MISSING)
    if target == request.model:
        return None
    request.target_model = target
    renamed = with_model(body, target)
    if request.prompt.read is not None:
        request.prompt.body = renamed
    return renamed, ModelRestorer(target, request.model)


def restorable(headers: codec.Headers) -> bool:
    """Whether an answer is plain, so that names can be found in it."""
    return (headers.get(CONTENT_ENCODING) or "identity").strip().lower() == "identity"
