"""The picker's own answer to GET /v1/models."""

import json

import pytest

from epp.protocol import codec
from epp.protocol.models import Listed, Model, asks_for_models, listed
from loadtest.load.proto import ext_proc_pb2 as pb


def of(pool: str, *models: str) -> list[Listed]:
    return [Listed(pool, Model(name)) for name in models]


@pytest.mark.parametrize(
    ("method", "path", "asks"),
    [
        ("GET", "/v1/models", True),
        ("GET", "/v1/models/?limit=5", True),
        ("GET", "/prefix/v1/models", True),
        ("POST", "/v1/models", False),
        ("GET", "/v1/models/phi-4", False),
        ("GET", "/v1/chat/completions", False),
    ],
)
def test_only_a_get_for_the_list_asks_for_models(method: str, path: str, asks: bool) -> None:
    assert asks_for_models(codec.headers_of({":method": method, ":path": path})) is asks


def test_headers_without_a_path_ask_for_nothing() -> None:
    assert not asks_for_models(codec.headers_of({":method": "GET", "x-original": "/v1/models"}))


def test_the_answer_lists_each_model_once_as_that_of_the_first_pool_that_has_it() -> None:
    framed = listed(of("b", "phi-4", "adapter") + of("a", "phi-4", "café"), 1_700_000_000)
    answer = pb.ProcessingResponse.FromString(framed[5:]).immediate_response
    assert answer.status.code == 200
    assert [(each.header.key, each.header.raw_value) for each in answer.headers.set_headers] == [("content-type", b"application/json")]
    body = json.loads(answer.body)
    assert body["object"] == "list"
    assert [(each["id"], each["owned_by"]) for each in body["data"]] == [("adapter", "b"), ("café", "a"), ("phi-4", "b")]
    assert {(each["object"], each["created"]) for each in body["data"]} == {("model", 1_700_000_000)}


def test_without_a_model_the_list_is_empty() -> None:
    assert json.loads(pb.ProcessingResponse.FromString(listed([], 0)[5:]).immediate_response.body) == {"object": "list", "data": []}


def test_what_is_known_of_a_model_is_listed_and_what_is_not_is_absent() -> None:
    models = [Listed("a", Model("base", "org/base", max_model_len=8192)), Listed("a", Model("lora", "base", "base"))]
    base, lora = json.loads(pb.ProcessingResponse.FromString(listed(models, 0)[5:]).immediate_response.body)["data"]
    assert base == {"id": "base", "object": "model", "created": 0, "owned_by": "a", "root": "org/base", "max_model_len": 8192}
    assert lora == {"id": "lora", "object": "model", "created": 0, "owned_by": "a", "root": "base", "parent": "base"}
