"""Who served the request, by the gateway's word, told to the client: for tests of gateways."""

from typing import Final

from epp.decision import SERVED, Decision, Response
from epp.plugin import ResponseReceived, plugin
from epp.request import Request

RESULT: Final = "x-conformance-test-served-endpoint"


@plugin("destination-endpoint-served-verifier")
class ServedVerifier(ResponseReceived):
    """Copies what the gateway's metadata say of who served into the response header `x-conformance-test-served-endpoint`."""

    def response_received(self, request: Request, decision: Decision, response: Response) -> None:
        gateway = response.gateway
        if gateway is None:
            found = "fail: missing envoy lb metadata"
        else:
            served = gateway.get(SERVED)
            found = served if isinstance(served, str) else "fail: missing destination endpoint served metadata"
        response.set_headers[RESULT] = found
