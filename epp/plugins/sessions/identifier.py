"""Find out the session of a request, for whoever keeps sessions together."""

import msgspec

from epp.candidates import Candidates
from epp.plugin import DataProducer, plugin
from epp.plugins.sessions._affinity import session_id
from epp.request import Request

COOKIE = "cookie"


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Exactly one of the two."""

    header_name: str = ""
    cookie_name: str = ""

    def __post_init__(self) -> None:
        if bool(self.header_name.strip()) == bool(self.cookie_name.strip()):
            raise ValueError("give exactly one of headerName and cookieName")


@plugin("session-id-producer")
class SessionId(DataProducer):
    """The value of a request header or of a cookie, without blanks around it; empty where there is none."""

    Params = Parameters
    produces = (session_id("session-id-producer"),)  # under its usual name

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._header = params.header_name.strip().lower()
        self._cookie = params.cookie_name.strip()
        self._session = session_id(name)
        self.produces = (self._session,)

    def produce(self, request: Request, candidates: Candidates) -> None:
        found = request.headers.get(self._header or COOKIE, "")
        request[self._session] = (found if self._header else cookie(found, self._cookie)).strip()


def cookie(header: str, name: str) -> str:
    """The value of the first cookie of that name in a Cookie header (RFC 6265: `name=value; name=value`)."""
    for pair in header.split(";"):
        key, equals, value = pair.strip().partition("=")
        if equals and key == name:
            return value
    return ""
