"""Request-header plugins read facts about a request from its headers. This one reads the session of a coding agent, so that each agent
gets a fair share.
"""

import msgspec

from epp.data import Datum
from epp.plugin import RequestHeader, plugin
from epp.request import DEFAULT_FLOW, Request
from epp.request.client_headers import FAIRNESS_ID, first_value, names_flow

KNOWN = ("x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")
AGENT: Datum[str] = Datum("agent-identity", str)


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which headers name an agent.

    additional_session_headers: Headers that are read before the built-in ones.
    """

    additional_session_headers: tuple[str, ...] = ()


@plugin("agent-identity")
class AgentIdentity(RequestHeader):
    """Identifies the agent of a request by the first non-empty session header, and emits it as `agent-identity`.

    The agent also becomes the flow of the request, unless the client names a flow by a fairness header. A value that is too long or not
    printable names no flow, as in a fairness header.
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
                if request.fairness_id == DEFAULT_FLOW and names_flow(agent) and first_value(headers, FAIRNESS_ID) is None:
                    request.fairness_id = agent
                return
