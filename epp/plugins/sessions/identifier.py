"""Find the session id of a request, for plugins that keep sessions together."""

import msgspec

from epp.candidates import Candidates
from epp.plugin import DataProducer, plugin
from epp.plugins.sessions._affinity import session_id
from epp.request import Request

COOKIE = "cookie"


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Where the session id is. Give exactly one of the two names.

    header_name: The header with the session id.
    cookie_name: The cookie with the session id.
    """

    header_name: str = ""
    cookie_name: str = ""

    def __post_init__(self) -> None:
        if bool(self.header_name.strip()) == bool(self.cookie_name.strip()):
            raise ValueError("give exactly one of headerName and cookieName")


@plugin("session-id-producer")
class SessionId(DataProducer):
    """Emits the session id of a request: the value of a header or a cookie without surrounding blanks; empty without such a value."""

    Params = Parameters
    produces = (session_id("session-id-producer"),)  # the key that an instance with the default name emits

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._header = params.header_name.strip().lower()
        self._cookie = params.cookie_name.strip()
        self._session = session_id(name)
        self.reads_headers = (self._header or COOKIE,)
        self.produces = (self._session,)

    def produce(self, request: Request, candidates: Candidates) -> None:
        text = request.headers.get(self._header or COOKIE, "")
        request[self._session] = (text if self._header else cookie(text, self._cookie)).strip()


def cookie(header: str, name: str) -> str:
    """Returns the value of the first cookie with this name in a Cookie header (RFC 6265: `name=value; name=value`); empty if missing."""
    for pair in header.split(";"):
        key, equals, value = pair.strip().partition("=")
        if equals and key == name:
            return value
    return ""
