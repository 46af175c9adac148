"""Request bodies as clients of each API write them, and the results of parsing them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from epp.errors import Refused
from epp.plugin import NoParams, Parser
from epp.protocol import refusals
from epp.request import Request


def parsed(parser: type[Parser], path: str, body: bytes | Mapping[str, Any]) -> Request:
    """A request that `parser` has filled."""
    request = Request(id="r", path=path, headers={}, now=0.0)
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    parser("p", NoParams()).parse(request, path, text)
    return request


def refusal(parser: type[Parser], path: str, body: bytes | Mapping[str, Any]) -> str:
    """The error text that the client gets; empty if the request is not refused."""
    try:
        parsed(parser, path, body)
    except Refused as refused:
        answer = refusals.answer(refused)
        assert answer.status == 400
        message: str = json.loads(answer.body)["error"]["message"]
        return message.removeprefix("inference error: BadRequest - ")
    return ""


def varint(value: int) -> bytes:
    made = b""
    while value > 0x7F:
        made += bytes((value & 0x7F | 0x80,))
        value >>= 7
    return made + bytes((value,))


def field(number: int, value: int | bytes | str) -> bytes:
    """One protobuf field: a number as a varint, anything else with its length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def packed(number: int, values: Sequence[int]) -> bytes:
    return field(number, b"".join(varint(value) for value in values))


def frame(message: bytes, flag: int = 0) -> bytes:
    """A gRPC message in a body."""
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message
