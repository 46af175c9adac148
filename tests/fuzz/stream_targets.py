"""The target for whole ext_proc streams: messages in any order, with bodies of clients and of model servers.

A stream gets exactly one answer to its request, in the order of the protocol, and leaves nothing behind.
"""

import gzip
from collections.abc import Mapping, Sequence
from typing import Any

from epp.candidates import Candidates
from epp.config.load import DEFAULT_TEXT, load
from epp.plugin import DataProducer, NoParams
from epp.protocol.codec import SUBSET_KEY, SUBSET_NAMESPACE, Kind
from epp.protocol.message_order import DECIDING
from epp.request import Request
from loadtest.load.proto import ext_proc_pb2 as pb
from tests.fakes import FakePool, FakeServices, candidates
from tests.fuzz.target import Target
from tests.pair import FakeStream, Pair
from workers.worker.extproc.app import App
from workers.worker.extproc.stream import PATH, open_stream

MESSAGE_OPS = 12  # of 16; the others: half-close, loss, an answer for a waiting decision, nothing
ENDPOINTS = tuple(f"10.0.0.{n}:8000" for n in range(1, 4))
HELD_MAX = 10_000


class Waits(DataProducer):
    """Suspends the decision of requests with x-wait, until the input resumes it."""

    def __init__(self) -> None:
        super().__init__("waits", NoParams())
        self.waiting: list[Any] = []

    def produce(self, request: Request, candidates: Candidates) -> Any:
        if "x-wait" not in request.headers:
            return None
        self.waiting.append(Future())
        return self.waiting[-1]


class Future:
    def __init__(self) -> None:
        self.callback: Any = None

    def add_done_callback(self, callback: Any) -> None:
        self.callback = callback

    def __await__(self) -> Any:
        yield self


class World:
    """One App over fake endpoints, for all inputs. No stream may leave anything without_trailers."""

    def __init__(self) -> None:
        config = load(DEFAULT_TEXT, "fuzz")
        self.waits = Waits()
        self.services = FakeServices()
        pipeline = config.pipeline
        pipeline.start(self.services)
        object.__setattr__(pipeline, "producers", (self.waits.produce, *pipeline.producers))
        columns = {c.name: [float(n) for n in range(1, 4)] for c in pipeline.columns}
        self.pair = Pair(pipeline, FakePool(candidates(columns, count=3)), body_bytes_max=1 << 18)

    def forget(self) -> None:
        """Clears the state that grows with the requests."""
        if len(self.services.held) > HELD_MAX:
            self.services.held.clear()


class RecordingStream(FakeStream):
    """A stream that records all its answers."""

    def __init__(self) -> None:
        super().__init__()
        self.records = bytearray()
        self.closed = False


_worlds: list[World] = []


def streams(data: bytes) -> None:
    """Runs records for two streams: an operation, a length, a message."""
    if not _worlds:
        _worlds.append(World())
    world = _worlds[0]
    app: App = world.pair.app
    pairs: list[tuple[RecordingStream, Any]] = []
    for _ in range(2):
        stream = RecordingStream()
        pairs.append((stream, open_stream(app, PATH, (), stream)))
    for record in stream_parts(data)[:64]:
        stream, handler = pairs[record[0] >> 7]
        operation = record[0] & 15
        world.pair.time += 0.001
        if operation == 14 and world.waits.waiting:
            world.waits.waiting.pop(0).callback(None)
        if stream.ended is not None or stream.closed:
            continue
        if operation < MESSAGE_OPS:
            handler.message(record[3:])
        elif operation == 12:
            deciding = handler.state == DECIDING
            handler.half_closed()
            assert (stream.ended is None) == deciding
        elif operation == 13:
            stream.closed = True
            handler.closed()
    for stream, handler in pairs:
        if stream.ended is None and not stream.closed:
            stream.closed = True
            handler.closed()
        check_answers(stream)
    for waiting in world.waits.waiting:
        waiting.callback(None)  # arrives late: the stream has ended
    world.waits.waiting.clear()
    faults, world.pair.faults[:] = list(world.pair.faults), []
    assert not faults, faults
    assert not any(world.pair.inflight), "some load still counts as in flight"
    assert not any(world.services.tokens.values())
    world.forget()


ORDER = {
    "request_headers": 0, "request_body": 1, "request_trailers": 2, "response_headers": 3, "response_body": 4, "response_trailers": 5,
    "immediate_response": 9,
}  # fmt: skip


def check_answers(stream: RecordingStream) -> None:
    """Whole messages; at most one answer to the request; each direction in order; nothing after an immediate response."""
    at, sent = 0, stream.sent
    kinds: list[str] = []
    while at < len(sent):
        size = int.from_bytes(sent[at + 1 : at + 5], "big")
        assert sent[at] == 0 and at + 5 + size <= len(sent)
        answer = pb.ProcessingResponse.FromString(sent[at + 5 : at + 5 + size])
        kind = answer.WhichOneof("response")
        assert kind in ORDER
        kinds.append(kind)
        if kind == "request_headers":
            options = answer.request_headers.response.header_mutation.set_headers
            targets = [o.header.raw_value.decode() for o in options if o.header.key == "x-gateway-destination-endpoint"]
            assert targets and targets[0] in ENDPOINTS
            assert answer.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == targets[0]
        at += 5 + size
    assert kinds.count("request_headers") + kinds.count("immediate_response") <= 1
    assert kinds.count("response_headers") <= 1
    assert "immediate_response" not in kinds[:-1]
    for direction in ("request", "response"):
        ranks = [ORDER[k] for k in kinds if k.startswith(direction)]
        without_trailers = [rank for rank in ranks if rank not in (2, 5)]  # Envoy may send trailers twice
        assert without_trailers == sorted(without_trailers)
        assert "request_body" not in kinds or kinds.index("request_headers") < kinds.index("request_body")


def stream_parts(data: bytes) -> list[bytes]:
    parts, at = [], 0
    while len(data) - at >= 3:
        end = at + 3 + int.from_bytes(data[at + 1 : at + 3], "big")
        parts.append(data[at:end])
        at = end
    return parts


def of_streams(parts: Sequence[bytes]) -> bytes:
    return b"".join([part[:1] + min(65535, len(part) - 3).to_bytes(2, "big") + part[3:65538] for part in parts if len(part) >= 3])


def record(message: bytes = b"", operation: int = 0, *, second: bool = False) -> bytes:
    return bytes((operation | second << 7,)) + len(message).to_bytes(2, "big") + message


def headers(path: str = "/v1/completions", *, last: bool = False, subset: list[str] | None = None, **more: str) -> bytes:
    request = pb.ProcessingRequest()
    for name, value in {":method": "POST", ":path": path, **{n.replace("_", "-"): v for n, v in more.items()}}.items():
        request.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    request.request_headers.end_of_stream = last
    if subset is not None:
        request.metadata_context.filter_metadata[SUBSET_NAMESPACE].update({SUBSET_KEY: subset})
    return request.SerializeToString()


def body(data: bytes, last: bool = True) -> bytes:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=last)).SerializeToString()


def answer_headers(kind: str = "application/json", status: str = "200", last: bool = False) -> bytes:
    response = pb.ProcessingRequest()
    for name, value in {":status": status, "content-type": kind}.items():
        response.response_headers.headers.headers.add(key=name, raw_value=value.encode())
    response.response_headers.end_of_stream = last
    return response.SerializeToString()


def answer_body(data: bytes, last: bool = True) -> bytes:
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=data, end_of_stream=last)).SerializeToString()


TRAILERS = pb.ProcessingRequest(request_trailers=pb.HttpTrailers()).SerializeToString()
ANSWER_TRAILERS = pb.ProcessingRequest(response_trailers=pb.HttpTrailers()).SerializeToString()
COMPLETION = b'{"model":"m","prompt":"hello","max_tokens":3}'
CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
USAGE = b'{"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":5}}}'
CHUNK = b'data: {"choices":[{"text":" word"}]}\n\n'


def stream_seeds() -> Mapping[str, bytes]:
    def records(*messages: bytes) -> bytes:
        return b"".join(map(record, messages))

    plain = (headers(), body(COMPLETION), answer_headers(), answer_body(USAGE))
    streamed = (
        headers("/v1/chat/completions", x_request_id="1"), body(CHAT), answer_headers("text/event-stream"),
        *[answer_body(CHUNK, False)] * 3, answer_body(b"data: " + USAGE + b"\n\n", False), answer_body(b"data: [DONE]\n\n"),
    )  # fmt: skip
    waiting = record(headers(x_wait="1")) + record(body(COMPLETION))
    foreign = headers(x_llm_d_inference_fairness_id="t", x_gateway_destination_endpoint="1.2.3.4:1", prefer="if-available")
    return {
        "plain": records(*plain) + record(b"", 12),
        "streamed": records(*streamed),
        "two": b"".join([record(m, second=n % 2 == 1) for m in streamed for n in range(2)]),
        "pieces": records(headers(), body(COMPLETION[:9], False), body(COMPLETION[9:], False), TRAILERS, *plain[2:]),
        "get": records(headers("/v1/models", last=True, subset=["10.0.0.2"]), answer_headers(), answer_body(b"x")),
        "subset": records(headers(subset=["10.0.0.3:8000", "[::1]:1"]), *plain[1:]),
        "none": records(headers(last=True, subset=[])),
        "gzip": records(headers(content_encoding="gzip"), body(gzip.compress(COMPLETION, mtime=0))),
        "waits": waiting + record(b"", 14) + records(*plain[2:]),
        "gives-up": waiting + record(answer_headers("text/plain", "504")) + record(b"", 14),
        "lost": waiting + record(b"", 13) + record(b"", 14),
        "local-reply": records(headers(), answer_headers("text/plain", "408"), answer_body(b"late")),
        "error": records(*plain[:2], answer_headers(status="503"), answer_body(b"no"), ANSWER_TRAILERS),
        "trailers": records(*plain[:3], answer_body(USAGE, False), ANSWER_TRAILERS),
        "twice": records(plain[0], plain[1], plain[1], *plain[2:], plain[3]),
        "anthropic": records(headers("/v1/messages"), body(CHAT.replace(b"true", b"false")), *plain[2:]),
        "other": records(headers("/other"), body(b"\0\1"), *plain[2:]),
        "foreign": records(foreign, *plain[1:]),
    }


def _tagged(kind: Kind, payload: bytes) -> bytes:
    return bytes((kind << 3 | 2, len(payload))) + payload


EXT_PROC = Target(
    "ext_proc",
    streams,
    stream_seeds,
    stream_parts,
    of_streams,
    words=(
        *(_tagged(kind, b"") for kind in Kind), *(_tagged(kind, b"\x0a\x00") for kind in Kind), _tagged(Kind.REQUEST_BODY, b"\x10\x01"),
        b"\x10\x01", b"\x18\x01", b"\x0a\x80\x00", b"\x1a\xff\xff\xff\xff\x0f", b"\x0b", b"\x0c", b":path", b"x-request-id", b"\x1a\x03200",
        b"content-encoding", b"text/event-stream", b'"usage"', b"envoy.lb.subset_hint",
    ),
    modules=("epp.protocol.codec", "epp.protocol.message_order", "workers.worker.extproc", "epp.protocol.usage"),
    allowance=2 << 20,
)  # fmt: skip
