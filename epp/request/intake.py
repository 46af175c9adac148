"""Builds a `Request` from headers and body, before admission.

    begin   headers ─▶ Request: path, id, flow, longest wait, subset
    read    body ─▶ parser ─▶ model, prompt, …; model rewrite; priority; RequestHeader plugins

Workers and `epp explain` both use this module. Before that, `workers.worker.extproc.request_phase` gathers and unpacks bodies.
"""

from collections.abc import Callable, Sequence
from typing import Final

from epp.decision.pipeline import ParseCall, Pipeline
from epp.errors import Cause, Refused, blame
from epp.plugin import Parser
from epp.protocol import codec, surrogates
from epp.protocol.usage import ANSWER
from epp.request import DEFAULT_FLOW, Request, Subset, Tenant, client_headers
from epp.request.renaming import MENTIONED, Renamed, member_of, parse_renamed, salt_of

REQUEST_ID: Final = "x-request-id"
PATH_NEEDLE: Final = codec.needle(":path")
REQUEST_ID_NEEDLE: Final = codec.needle(REQUEST_ID)
CLIENT_PREFIX: Final = b"x-llm-d-"  # the prefix of client headers
OLDER_CLIENT_PREFIX: Final = b"x-gateway-"  # the prefix of their older names
FAIRNESS: Final = b"-inference-fairness-id"  # the suffix of both names of this header
OBJECTIVE: Final = b"-inference-objective"  # the suffix of both names of this header
TTL: Final = b"-ttl"  # a part of the names of both headers with a TTL

Rewrites = Callable[[], Callable[[str], str | None] | None]
PriorityOf = Callable[[str], int]


class Intake:
    """Reads all requests of one worker.

    `rewrites`: a function that returns the present rules as a function, or None if there are no rules. The returned function maps the model
    name of a request to the name to request instead, or to None if no InferenceModelRewrite applies. Its result takes precedence over the
    header `x-llm-d-model-name-rewrite`. `rewrites` itself is None if the picker does not watch InferenceModelRewrites.
    `priority_of`: a function that maps the name of an InferenceObjective to its priority; None if the picker does not watch
    InferenceObjectives.
    """

    def __init__(self, rewrites: Rewrites | None = None, priority_of: PriorityOf | None = None) -> None:
        self.rewrites = rewrites
        self.priority_of = priority_of

    def begin(
        self, headers: codec.Headers, now: float, body_bytes: int, subset: Sequence[str] | None, tenant: Tenant | None = None
    ) -> Request:
        """Creates the request from its headers; `read` adds the body.

        `now`: monotonic seconds. `subset`: the endpoints that the gateway allows, `ip:port` or `ip`; None if it allows all.
        `tenant`: None if no tenants are configured; the client then names its flow.
        The request's path is "" if the gateway does not tell the path, such as NGINX Gateway Fabric.
        """
        path = headers.find(PATH_NEEDLE) or headers.get("x-original-path") or headers.get("x-forwarded-path") or ""
        if "?" in path:
            path = path.partition("?")[0]
        request = Request(
            id=headers.find(REQUEST_ID_NEEDLE) or "",
            path=path,
            headers=headers,
            now=now,
            body_bytes=body_bytes,
            subset=Subset(subset) if subset is not None else None,
        )
        if headers.mentions(CLIENT_PREFIX) or headers.mentions(OLDER_CLIENT_PREFIX):
            request.wishes = True
            if headers.mentions(FAIRNESS):
                request.fairness_id = client_headers.fairness_id(headers) or DEFAULT_FLOW
            if headers.mentions(TTL):
                request.ttl_s = client_headers.ttl_s(headers)
        if tenant is not None:
            request.tenant, request.fairness_id = tenant, tenant.name
        return request

    def _parsed(self, reader: Parser, parse: ParseCall, request: Request, body: bytes | memoryview, *, named: bool) -> Renamed | None:
        """Parses the body. `named`: whether the request may have the header that renames the model. Raises Refused."""
        rewrite = self.rewrites() if self.rewrites is not None else None
        if named or rewrite is not None:
            return parse_renamed(rewrite, reader, parse, request, body, header=named)
        parse(request, request.path, body)
        return None

    def _readable(self, reader: Parser, parse: ParseCall, request: Request, body: bytes | memoryview, *, named: bool) -> Renamed | None:
        """Does what `_parsed` does, also for a body with halves of surrogate pairs."""
        try:
            return self._parsed(reader, parse, request, body, named=named)
        except Refused as refused:
            readable = surrogates.replaced(body) if refused.cause is Cause.INVALID_BODY else None
            if readable is None:
                raise
            return self._parsed(reader, parse, request, readable, named=named)

    def _private(
        self, tenant: Tenant, reader: Parser, parse: ParseCall, request: Request, body: bytes | memoryview, *, named: bool
    ) -> Renamed | None:
        """Parses the body, and sets the cache salt of the tenant, in place of the client's. Returns the body to send on.

        Returns None if the body reaches no cache, and so passes unchanged. Most bodies have no salt, so if the parser has seen no salt, the
        body is not searched for one.
        """
        member = member_of(reader)
        try:
            renamed = self._readable(reader, parse, request, body, named=named)
        except Refused:  # the body may be refused because of the client's salt, which has no effect
            body = member.put(body, tenant.salt)
            renamed = self._readable(reader, parse, request, body, named=named)
        request.cache_salt = tenant.salt
        if renamed is None:
            answer = request[ANSWER]
            if answer is not None and answer.skip:
                return None
            renamed = Renamed(body, None)
        if not request.salted or member.lacks(renamed.body):
            renamed.insert(salt_of(tenant, member))
        else:
            renamed.body = member.put(renamed.body, tenant.salt)
        return renamed

    def read(
        self, request: Request, headers: codec.Headers, pipeline: Pipeline, parser: tuple[Parser, int], body: bytes | memoryview
    ) -> Renamed | None:
        """Reads the body into the request. `parser` is the result of `Parsers.find` for the path.

        If the model or the cache salt is changed, returns the body to send on instead and what restores the model's name in the response;
        else None. Raises Refused.
        """
        reader, place = parser
        parse, tenant = pipeline.parses[place], request.tenant
        wishes = request.wishes
        named = wishes and headers.mentions(MENTIONED)
        try:
            if tenant is not None and tenant.salt and reader.salt_member:
                renamed = self._private(tenant, reader, parse, request, body, named=named)
            else:
                renamed = self._readable(reader, parse, request, body, named=named)
        except Exception as problem:
            blame(problem, reader)
            raise
        if self.priority_of is not None and ((wishes and headers.mentions(OBJECTIVE)) or request.tenant is not None):
            objective = request_objective(request)
            request.priority = self.priority_of(objective) if objective else 0
        for read in pipeline.request_header:
            try:
                read(request)
            except Exception as problem:
                blame(problem, pipeline.owner(read))
                raise
        return renamed


def request_objective(request: Request) -> str:
    """Returns the InferenceObjective of a request: the one that the client names, if the tenant may use it, or else the tenant's first
    objective; or "".
    """
    claimed = client_headers.objective(request.headers) if request.wishes else ""
    return claimed if request.tenant is None else request.tenant.objective(claimed)
