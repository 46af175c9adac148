"""The generated messages compared with bytes from the original definitions of Envoy and gRPC.

The literals were encoded with envoy.service.ext_proc.v3 and grpc.health.v1, so these tests find a wrong field number or type in our
`.proto` files. One test checks that the table covers every field of our messages.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from loadtest.load.proto import ext_proc_pb2 as ext_proc
from loadtest.load.proto import health_pb2 as health
from tests.cases import cases

ROOT = Path(__file__).parents[3]


def struct(key: str, value: str) -> Struct:
    built = Struct()
    built[key] = value
    return built


HEADERS = ext_proc.HeaderMap(headers=[ext_proc.HeaderValue(key="a", value="b"), ext_proc.HeaderValue(key="c", raw_value=b"d")])
HTTP_HEADERS = ext_proc.HttpHeaders(headers=HEADERS, end_of_stream=True)
HTTP_BODY = ext_proc.HttpBody(body=b"xy", end_of_stream=True)
HTTP_TRAILERS = ext_proc.HttpTrailers(trailers=HEADERS)
HEADER_MUTATION = ext_proc.HeaderMutation(
    set_headers=[
        ext_proc.HeaderValueOption(
            header=ext_proc.HeaderValue(key="k", raw_value=b"v"),
            append_action=ext_proc.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            keep_empty_value=True,
        )
    ],
    remove_headers=["gone"],
)
HEADERS_RESPONSE = ext_proc.HeadersResponse(
    response=ext_proc.CommonResponse(
        status=ext_proc.CommonResponse.CONTINUE_AND_REPLACE, header_mutation=HEADER_MUTATION, clear_route_cache=True
    )
)
TRAILERS_RESPONSE = ext_proc.TrailersResponse(header_mutation=HEADER_MUTATION)


def body_response(mutation: ext_proc.BodyMutation) -> ext_proc.BodyResponse:
    return ext_proc.BodyResponse(response=ext_proc.CommonResponse(body_mutation=mutation))


STREAMED = body_response(ext_proc.BodyMutation(streamed_response=ext_proc.StreamedBodyResponse(body=b"xy", end_of_stream=True)))
IMMEDIATE = ext_proc.ImmediateResponse(
    status=ext_proc.HttpStatus(code=429), headers=HEADER_MUTATION, body=b"no", grpc_status=ext_proc.GrpcStatus(status=8), details="why"
)

REQUESTS = {
    "12140a100a060a01611201620a060a01631a01641801": {"request_headers": HTTP_HEADERS},
    "1a140a100a060a01611201620a060a01631a01641801": {"response_headers": HTTP_HEADERS},
    "42120a100a026e73120a0a080a016b12031a0176500122060a0278791001": {
        "request_body": HTTP_BODY,
        "metadata_context": ext_proc.Metadata(filter_metadata={"ns": struct("k", "v")}),
        "observability_mode": True,
    },
    "2a060a0278791001": {"response_body": HTTP_BODY},
    "32120a100a060a01611201620a060a01631a0164": {"request_trailers": HTTP_TRAILERS},
    "3a120a100a060a01611201620a060a01631a0164": {"response_trailers": HTTP_TRAILERS},
}
RESPONSES = {
    "420a0a080a016b12031a01760a1c0a1a080112140a0c0a060a016b1a0176180220011204676f6e652801": {
        "request_headers": HEADERS_RESPONSE,
        "dynamic_metadata": struct("k", "v"),
    },
    "121c0a1a080112140a0c0a060a016b1a0176180220011204676f6e652801": {"response_headers": HEADERS_RESPONSE},
    "1a0c0a0a1a081a060a0278791001": {"request_body": STREAMED},
    "22080a061a040a027879": {"response_body": body_response(ext_proc.BodyMutation(body=b"xy"))},
    "22060a041a021001": {"response_body": body_response(ext_proc.BodyMutation(clear_body=True))},
    "2a160a140a0c0a060a016b1a0176180220011204676f6e65": {"request_trailers": TRAILERS_RESPONSE},
    "32160a140a0c0a060a016b1a0176180220011204676f6e65": {"response_trailers": TRAILERS_RESPONSE},
    "3a280a0308ad0312140a0c0a060a016b1a0176180220011204676f6e651a026e6f220208082a03776879": {"immediate_response": IMMEDIATE},
}
HEALTH: dict[str, Message] = {
    "0a0173": health.HealthCheckRequest(service="s"),
    "0802": health.HealthCheckResponse(status=health.HealthCheckResponse.NOT_SERVING),
    "0a070a017312020801": health.HealthListResponse(statuses={"s": health.HealthCheckResponse(status=health.HealthCheckResponse.SERVING)}),
}
WIRE: list[tuple[str, Message]] = [
    *((wire, ext_proc.ProcessingRequest(**fields)) for wire, fields in REQUESTS.items()),
    *((wire, ext_proc.ProcessingResponse(**fields)) for wire, fields in RESPONSES.items()),
    *HEALTH.items(),
]


@cases(("wire", "message"), WIRE)
def test_original_bytes_parse_to_our_message(wire: str, message: Message) -> None:
    assert type(message).FromString(bytes.fromhex(wire)) == message


@cases(("wire", "message"), WIRE)
def test_our_bytes_are_as_long_as_the_original_ones_and_parse_back(wire: str, message: Message) -> None:
    ours = message.SerializeToString()
    assert len(ours) == len(bytes.fromhex(wire))
    assert type(message).FromString(ours) == message


def test_omitted_fields_do_not_disturb_the_others() -> None:
    # Envoy's fields 9 and 11.
    attributes_and_protocol_config = "4a0f0a016e120a0a080a016b12031a01765a02080422060a0278791001"
    request = ext_proc.ProcessingRequest.FromString(bytes.fromhex(attributes_and_protocol_config))
    assert request.WhichOneof("request") == "request_body"
    assert request.request_body == HTTP_BODY


def test_a_streamed_body_answer_has_the_bytes_of_the_body_it_answers() -> None:
    answer = ext_proc.StreamedBodyResponse(body=b"xy", end_of_stream=True)
    assert answer.SerializeToString() == HTTP_BODY.SerializeToString()


def used_fields(message: Message) -> Iterator[FieldDescriptor]:
    for field, value in message.ListFields():
        yield field
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            value = list(value.values())
        for inner in value if field.is_repeated else [value]:
            yield from used_fields(inner)


def test_every_field_of_our_messages_is_covered_by_original_bytes() -> None:
    used = {field.full_name for _, message in WIRE for field in used_fields(message)}
    descriptors: list[Descriptor] = [
        descriptor for module in (ext_proc, health) for descriptor in module.DESCRIPTOR.message_types_by_name.values()
    ]
    declared = {field.full_name for descriptor in descriptors for field in descriptor.fields}
    assert declared - used == set()


@pytest.mark.parametrize("module", [ext_proc, health])
def test_the_committed_classes_match_the_proto_file(module: ModuleType, tmp_path: Path) -> None:
    """`make proto` generates them again."""
    pytest.importorskip("grpc_tools")  # not on emulated machines
    proto = Path(module.DESCRIPTOR.name)
    command = [sys.executable, "-m", "grpc_tools.protoc", "--proto_path=.", f"--python_out={tmp_path}"]
    subprocess.run([*command, f"--pyi_out={tmp_path}", str(proto)], cwd=ROOT, check=True, timeout=50)
    for suffix in ("_pb2.py", "_pb2.pyi"):
        generated = proto.with_name(proto.stem + suffix)
        assert (ROOT / generated).read_text() == (tmp_path / generated).read_text()
