"""Reads Vertex AI's gRPC API: a gRPC frame has a message, which has an HttpBody, which has OpenAI's JSON.

The deployment determines the model. So bodies without a model are accepted, and the picker rewrites no model.
"""

from typing import Final

from epp.errors import Cause, Refused
from epp.plugin import Parser, plugin
from epp.plugins.parsers import _openai
from epp.protocol import grpc_frames, wire
from epp.protocol.usage import ANSWER, UNSEEN, AnswerHandling, HttpBodyScanner
from epp.request import Request

SCANNED: Final = AnswerHandling(HttpBodyScanner)
DATA: Final = 2  # the field number of HttpBody.data
METHODS: Final = {  # path -> (message, field of its HttpBody, API of the JSON inside)
    "PredictionService/ChatCompletions": ("ChatCompletionsRequest", 2, "/chat/completions"),
    "PredictionService/StreamRawPredict": ("StreamRawPredictRequest", 2, "/responses"),
    "PredictionService/RawPredict": ("RawPredictRequest", 2, "/responses"),
}


@plugin("vertexai-parser")
class VertexAi(Parser):
    """Reads chat completions and raw predictions of Vertex AI's gRPC API. Requests of other methods, and answers to them, pass unread."""

    paths = tuple(METHODS)
    app_protocols = ("h2c",)
    reads_usage = True
    keeps = (ANSWER,)

    def parse(self, request: Request, path: str, body: bytes | memoryview) -> None:
        path = path.removesuffix("/")
        method = next((method for suffix, method in METHODS.items() if path.endswith(suffix)), None)
        if method is None:
            request[ANSWER] = UNSEEN
            return
        name, field, api = method
        request[ANSWER] = SCANNED
        try:
            message = grpc_frames.only(body)
        except ValueError as problem:
            raise Refused(Cause.INVALID_BODY, f"invalid or unsupported gRPC payload: {problem}") from None
        try:
            data = _data(message, field)
        except ValueError as problem:
            raise Refused(Cause.INVALID_BODY, f"unmarshaling {name}: {problem}") from None
        if data is None:
            raise Refused(Cause.INVALID_BODY, f"{name} has no HttpBody")
        try:
            model = _openai.read(request, _openai.api_of(api), data)
        except Refused as refused:
            raise Refused(refused.cause, f"parsing {name}: {refused.detail}") from None
        if isinstance(model, str) and model:
            _openai.named(request, model)


def _data(message: bytes | memoryview, field: int) -> bytes | memoryview | None:
    """Returns the data of the HttpBody in this field of a message; None without an HttpBody. Raises ValueError for a malformed message."""
    last: bytes | memoryview | None = None
    walk = wire.Walk()
    for number, value in walk.fields(message):
        if number == field:
            last = b""
            for inner, data in walk.fields(wire.submessage(value)):
                if inner == DATA:
                    last = wire.submessage(data)
    return last
