"""Tells the client which endpoint served its request, according to the gateway. For tests of gateways."""

from typing import Final

from epp.decision.decision import SERVED, Decision, Response
from epp.plugin import ResponseReceived, plugin
from epp.request import Request

RESULT: Final = "x-conformance-test-served-endpoint"


@plugin("destination-endpoint-served-verifier")
class ServedVerifier(ResponseReceived):
    """Copies the served endpoint from the gateway's metadata into the header `x-conformance-test-served-endpoint`. For tests only."""

    def response_received(self, request: Request, decision: Decision, response: Response) -> None:
        gateway = response.gateway
        if gateway is None:
            text = "fail: missing envoy lb metadata"
        else:
            served = gateway.get(SERVED)
            text = served if isinstance(served, str) else "fail: missing destination endpoint served metadata"
        response.set_headers[RESULT] = text
