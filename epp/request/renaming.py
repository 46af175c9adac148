"""Changes bodies: requests another model from the model server than the body names, and sets a tenant's cache salt.

The model comes from a header (for one request) or from a rule, `rewrite` (for all requests for a model). A rule takes precedence.
Headers that are not trusted (`--trust-client-headers`) are not read. `epp.protocol.rewrite` changes the bodies.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from epp.decision.pipeline import ParseCall
from epp.errors import Cause, Refused
from epp.plugin import Parser
from epp.protocol import codec
from epp.protocol.rewrite import Member, ModelRestorer, with_model
from epp.protocol.usage import ANSWER
from epp.request import Request, client_headers
from epp.request.tenant import Tenant

MENTIONED: Final = b"-model-name-rewrite"  # the suffix of both names of the header
CONTENT_ENCODING: Final = "content-encoding"
UNSIZED: Final = ("content-length",)  # removed from a response if its length changes


class Renamed(NamedTuple):
    """Holds the body to send on instead, and the restorer that puts the original model name into the response.

    `restorer`: None if the model keeps its name, and only the cache salt is another.
    """

    body: bytes
    restorer: ModelRestorer | None


def parse_renamed(
    rewrite: Callable[[str], str | None] | None,
    parser: Parser,
    parse: ParseCall,
    request: Request,
    body: bytes | memoryview,
    *,
    header: bool = True,
) -> Renamed | None:
    """Parses the body and renames the model. Returns None if the model keeps its name. Raises Refused.

    `header`: whether to look for the header. The search for an absent header costs more than everything else here.
    """
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
    return Renamed(renamed, ModelRestorer(target, request.model))


_members: Final[dict[str, Member]] = {}  # by name; parsers determine the names


def salted(parser: Parser, tenant: Tenant, body: bytes | memoryview) -> bytes | None:
    """Returns the body with the tenant's cache salt in place of the client's; None if it keeps the client's. Raises Refused."""
    if not tenant.salt or not parser.salt_member:
        return None
    member = _members.get(parser.salt_member)
    if member is None:
        member = _members[parser.salt_member] = Member(parser.salt_member)
    return member.put(body, tenant.salt)


def restorable(headers: codec.Headers) -> bool:
    """Returns whether a response is not compressed, so that the model name can be found in its body."""
    return (headers.get(CONTENT_ENCODING) or "identity").strip().lower() == "identity"
