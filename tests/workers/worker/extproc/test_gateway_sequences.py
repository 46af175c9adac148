"""The messages of gateways that do not run here, as their code builds them, and what each of them reads of the answers.

    NGINX Gateway Fabric  its repository at e55bfe33 (August 2026): cmd/gateway/endpoint_picker.go, and for the header fields that reach
                          it internal/controller/nginx/modules/src/epp.js
    agentgateway          its repository at 75b4e6ce (v1.4.1 and later, August 2026): crates/agentgateway/src/http/ext_proc.rs, with
                          headers.rs and mutation.rs in the folder ext_proc there

`tests/e2e/test_gateway_filters.py` has the gateways whose proxy is Envoy.
"""

import gzip
import ipaddress
import json
from typing import Any

import pytest

from epp.plugin import NoParams
from epp.protocol.codec import BodyMode
from loadtest.load.proto import ext_proc_pb2 as pb
from tests.pair import Envoy, Pair, Response, bodies
from tests.workers.worker.extproc.streams import BODY, USAGE, Remembers, pair
from tests.workers.worker.extproc.test_body_modes import config
from tests.workers.worker.extproc.test_waiting_requests import Asks, Site

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
CHAT = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'


# NGINX Gateway Fabric


class Fabric:
    """`createEndpointPickerHandler`: headers with the client's fields alone, the whole body, CloseSend; then it reads to the end."""

    def __init__(self, p: Pair) -> None:
        self._envoy = p.open()
        self.answers: list[Response] = []

    def ask(self, body: bytes, **fields: str) -> "Fabric":
        """`sendRequest`. No pseudo-header field is sent, and values are in `value`, not in `raw_value`."""
        message = pb.ProcessingRequest()
        sent = {"x-epp-host": "picker", "x-epp-port": "9002", "content-type": "application/json", **fields}
        for name, value in {**sent, **({"content-length": str(len(body))} if body else {})}.items():
            message.request_headers.headers.headers.add(key=name.replace("_", "-"), value=value)
        message.request_headers.end_of_stream = not body
        self.answers += self._envoy.say(message)
        if body:
            self.answers += self._envoy.body(body)
        if self._envoy.stream.ended is None:
            self._envoy.handler.half_closed()
        return self

    def read(self) -> tuple[int, str]:
        """What the handler makes of the answers: a status, and the endpoint or the body of an error."""
        self.answers += self._envoy.answers()
        assert self._envoy.stream.ended == (0, ""), "it reads until io.EOF"
        endpoint = ""
        for answer in self.answers:
            if answer.HasField("immediate_response"):
                return answer.immediate_response.status.code, answer.immediate_response.body.decode()
            for option in answer.request_headers.response.header_mutation.set_headers:
                if option.header.key == DESTINATION:
                    endpoint = option.header.raw_value.decode()
        return 200, endpoint


@pytest.mark.parametrize(
    ("body", "api"),
    [
        (BODY, "/v1/completions"),
        (CHAT, "/v1/chat/completions"),
        (b'{"model": "m", "input": "hello"}', "/v1/responses"),
        (b'{"model": "m", "input": ["a", "b"], "encoding_format": "float"}', "/v1/embeddings"),
        (gzip.compress(CHAT, mtime=0), "/v1/chat/completions"),
    ],
)
def test_fabric_names_no_path_and_gets_a_target_for_each_api(body: bytes, api: str) -> None:
    p = pair()
    packed = {"content_encoding": "gzip"} if body.startswith(b"\x1f\x8b") else {}
    fabric = Fabric(p).ask(body, **packed)
    while p.turns:
        p.turns.popleft()()
    assert fabric.read() == (200, "10.0.0.2:8000")
    assert p.recent.kept[0][1].path == api
    assert sum(p.inflight) == 0 and p.faults == [], "the picker sees no response, so nothing stays in flight"


def test_fabric_gets_the_error_of_the_picker_as_its_own() -> None:
    status, body = Fabric(pair()).ask(b'{"prompt": "no model"}').read()
    assert status == 400 and "model not found" in body
    status, body = Fabric(pair(waiting=())).ask(BODY).read()
    assert status == 503


def test_fabric_sends_a_request_without_a_body_as_headers_alone() -> None:
    status, endpoint = Fabric(pair()).ask(b"").read()
    assert status == 200 and endpoint.startswith("10.0.0.")


def test_fabric_reads_a_target_that_is_decided_after_its_close() -> None:
    site = Site(Asks("asks", NoParams()))
    fabric = Fabric(site.pair).ask(BODY)
    assert fabric.answers == []
    site.services.asked[0].answer(b"fact")
    status, endpoint = fabric.read()
    assert status == 200 and endpoint.startswith("10.0.0.")
    assert sum(site.pair.inflight) == 0


# agentgateway


class Agent:
    """`ExtProcInstance`: both directions FULL_DUPLEX_STREAMED, trailers sent, no metadata with the request.

    `req_to_header_map` sends pseudo-header fields last and in `value`, all others in `raw_value`. `send_body_stream` marks the last
    piece, or sends an empty one behind it.
    """

    def __init__(self, p: Pair) -> None:
        self._envoy: Envoy = p.open()
        self._served: str | None = None

    def request(self, body: bytes, *, cut: int = 0, empty_last: bool = False) -> list[Response]:
        message = pb.ProcessingRequest()
        fields = message.request_headers.headers.headers
        fields.add(key="content-type", raw_value=b"application/json")
        for name, value in ((":method", "POST"), (":scheme", "http"), (":authority", "a"), (":path", "/v1/completions")):
            fields.add(key=name, value=value)
        duplex = BodyMode.FULL_DUPLEX_STREAMED
        self._envoy.handler.message(message.SerializeToString() + config(duplex, duplex))
        answers = self._envoy.answers()
        pieces = [body[:cut], body[cut:]] if cut else [body]
        for piece in pieces[:-1]:
            answers += self._envoy.body(piece, last=False)
        answers += self._envoy.body(pieces[-1], last=not empty_last)
        return answers + (self._envoy.body(b"") if empty_last else [])

    def socket_address(self, answers: list[Response]) -> tuple[Any, int]:
        """`mutate_request`: parses the header as a SocketAddr, which is one address with a port."""
        assert answers[0].WhichOneof("response") == "request_headers", "the target is read from the first answer"
        options = answers[0].request_headers.response.header_mutation.set_headers
        (value,) = [o.header.raw_value.decode() for o in options if o.header.key == DESTINATION]
        host, _, port = value.rpartition(":")
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")), int(port)

    def response(self, status: str, served: str) -> list[Response]:
        """`mutate_response`: every message of the response names the endpoint that served the request."""
        self._served = served
        message = pb.ProcessingRequest()
        message.response_headers.headers.headers.add(key="content-type", raw_value=b"application/json")
        message.response_headers.headers.headers.add(key=":status", value=status)
        return self._say(message)

    def body(self, data: bytes, *, last: bool) -> list[Response]:
        return self._say(pb.ProcessingRequest(response_body=pb.HttpBody(body=data, end_of_stream=last)))

    def _say(self, message: pb.ProcessingRequest) -> list[Response]:
        message.metadata_context.filter_metadata["envoy.lb"][SERVED] = self._served
        return self._envoy.say(message)

    def leave(self) -> None:
        """The sender of the stream is dropped."""
        if self._envoy.stream.ended is None:
            self._envoy.handler.half_closed()
        self._envoy.handler.closed()


@pytest.mark.parametrize("empty_last", [False, True])
@pytest.mark.parametrize("cut", [0, 9])
def test_agentgateway_reads_one_address_from_the_header(cut: int, empty_last: bool) -> None:
    p = pair()
    agent = Agent(p)
    answers = agent.request(BODY, cut=cut, empty_last=empty_last)
    assert agent.socket_address(answers) == (ipaddress.ip_address("10.0.0.2"), 8000)
    assert bodies(answers)[0] == BODY and bodies(answers)[1][-1]
    assert p.inflight[:3] == [0, 1, 0]
    agent.leave()
    assert sum(p.inflight) == 0


def test_agentgateway_names_the_server_with_every_message_of_the_response() -> None:
    remembers = Remembers()
    p = pair(remembers)
    agent = Agent(p)
    agent.request(BODY)
    assert [a.WhichOneof("response") for a in agent.response("200", "10.0.0.3:8000")] == ["response_headers"]
    assert p.inflight[:3] == [0, 0, 1], "the load follows the server"
    parts = USAGE[:40], USAGE[40:60], USAGE[60:]
    passed = [agent.body(part, last=part is parts[-1]) for part in parts]
    assert [bodies(answers, "response_body")[0] for answers in passed] == list(parts)
    agent.leave()
    assert remembers.statuses == [200]
    (usage,) = remembers.usages
    assert usage is not None and usage.completion == 4
    assert sum(p.inflight) == 0 and p.faults == []


@pytest.mark.parametrize(("status", "served", "points"), [("200", 1, 0), ("500", 0, 3)])
def test_agentgateway_has_the_status_behind_the_other_fields_and_it_counts(status: str, served: int, points: int) -> None:
    p = pair()
    agent = Agent(p)
    agent.request(BODY)
    agent.response(status, "10.0.0.2:8000")
    assert (p.area.served.tolist()[1], p.area.failed.tolist()[1]) == (served, points)


def test_agentgateway_takes_the_answer_to_a_request_without_a_body_from_its_headers() -> None:
    p = pair()
    message = pb.ProcessingRequest()
    for name, value in ((":method", "GET"), (":scheme", "http"), (":path", "/v1/models")):
        message.request_headers.headers.headers.add(key=name, value=value)
    message.request_headers.end_of_stream = True
    envoy = p.open()
    duplex = BodyMode.FULL_DUPLEX_STREAMED
    envoy.handler.message(message.SerializeToString() + config(duplex, duplex))
    address, port = Agent(p).socket_address(envoy.answers())
    assert str(address).startswith("10.0.0.") and port == 8000


def test_agentgateway_shows_an_error_answer_to_its_client() -> None:
    (answer,) = Agent(pair()).request(b'{"prompt": "no model"}')
    assert answer.immediate_response.status.code == 400
    assert json.loads(answer.immediate_response.body)["error"]["type"] == "BadRequest"
