"""Changes bodies: replaces the model's name by the model to request, and sets a tenant's cache salt.

The model comes from a header (for one request) or from a rule, `rewrite` (for all requests for a model). A rule takes precedence.
Headers that are not trusted (`--trust-client-headers`) are not read. `epp.protocol.rewrite` changes the bodies.
"""

from collections.abc import Callable
from typing import Final

from epp.decision.pipeline import ParseCall
from epp.errors import Cause, Refused
from epp.plugin import Parser
from epp.protocol import codec
from epp.protocol.rewrite import Member, ModelRestorer, inserted, insertion, with_model
from epp.protocol.usage import ANSWER
from epp.request import Request, Tenant, client_headers

MENTIONED: Final = b"-model-name-rewrite"  # the suffix of both names of the header
CONTENT_ENCODING: Final = "content-encoding"
UNSIZED: Final = ("content-length",)  # removed from a response if its length changes


class Renamed:
    """The body to send on instead: `body` with `text` inserted at `at`, so that a long body need not be copied.

    `restorer`: puts the original model name into the response; None if the model keeps its name, and only the cache salt changes.
    """

    __slots__ = ("at", "body", "restorer", "text")

    def __init__(self, body: bytes | memoryview, restorer: ModelRestorer | None) -> None:
        self.body = body
        self.restorer = restorer
        self.at = 0
        self.text = b""

    def insert(self, member: bytes) -> None:
        """Inserts a first member into the body, a JSON object. `member`: the result of `Member.text`."""
        self.at, self.text = insertion(self.body, member)

    def whole(self) -> bytes:
        """Returns the whole body."""
        return inserted(self.body, self.at, self.text)


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

    `header`: whether to look for the header. Without the header, the search for it costs more than the rest of this function.
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


def member_of(parser: Parser) -> Member:
    """Returns the member of bodies that has the cache salt, for a parser that names this member."""
    member = _members.get(parser.salt_member)
    if member is None:
        member = _members[parser.salt_member] = Member(parser.salt_member)
    return member


def salt_of(tenant: Tenant, member: Member) -> bytes:
    """Returns the tenant's cache salt as text to insert into a body."""
    text = tenant.members.get(member.name)
    if text is None:
        text = tenant.members[member.name] = member.text(tenant.salt)
    return text


def restorable(headers: codec.Headers) -> bool:
    """Returns whether a response is uncompressed, so that the model name can be found in its body."""
    return (headers.get(CONTENT_ENCODING) or "identity").strip().lower() == "identity"
