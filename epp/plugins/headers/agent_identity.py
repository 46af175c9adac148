"""Know coding agents by the session headers that they send, so that each gets a fair share of its own."""

import msgspec

from epp.client_headers import FAIRNESS_ID, given, names_flow
from epp.data import Datum
from epp.plugin import RequestHeader, plugin
from epp.request import DEFAULT_FLOW, Request

KNOWN = ("x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")
AGENT: Datum[str] = Datum("agent-identity", str)


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Headers that are looked at before the known ones."""

    additional_session_headers: tuple[str, ...] = ()


@plugin("agent-identity")
class AgentIdentity(RequestHeader):
    """The first of the headers that is not empty names the agent: it becomes the datum `agent-identity`.

    It is the flow of the request too, unless the client named one itself by a fairness header. As for that header, what is
    too long or not printable names no flow.
    """

    Params = Parameters
    produces = (AGENT,)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        added = tuple(header.strip().lower() for header in params.additional_session_headers)
        self._headers = tuple(dict.fromkeys((*filter(None, added), *KNOWN)))

    def read(self, request: Request) -> None:
        headers = request.headers
        for name in self._headers:
            agent = headers.get(name)
            if agent:
                request[AGENT] = agent
                if request.fairness_id == DEFAULT_FLOW and names_flow(agent) and given(headers, FAIRNESS_ID) is None:
                    request.fairness_id = agent
                return
