"""Request bodies and response shapes of the simulated servers."""

import json
from itertools import islice
from typing import Any

import pytest

from loadtest.sim.api import SHAPES, Chat, Completion, Embedding, Responses, Shape, parse
from loadtest.sim.request import PROMPTS_MAX, ApiError, Ask, Models
from loadtest.sim.text import text_of, words

MODELS = Models(("base", "alias"), ("lora-a",), block_size=16, seed=7)


def read(shape: type[Shape], models: Models = MODELS, **body: Any) -> Ask:
    return parse(shape, json.dumps(body).encode(), models)


def chat(*contents: Any, **body: Any) -> Ask:
    messages = [{"role": "user", "content": content} for content in contents]
    return read(Chat, messages=messages, **body)


def test_a_completion_has_sixteen_tokens_by_default() -> None:
    assert read(Completion, prompt="x").max_tokens == 16
    assert read(Completion, prompt="x", max_tokens=5, ignore_eos=True).max_tokens == 5
    assert chat("x", max_tokens=5, max_completion_tokens=6).max_tokens == 6
    assert chat("x", max_tokens=5).max_tokens == 5
    assert read(Responses, input="x", max_output_tokens=3).max_tokens == 3
    assert read(Embedding, input="x", max_tokens=9).max_tokens == 0


def test_prompts_may_be_strings_token_ids_or_lists_of_them() -> None:
    assert read(Completion, prompt="x" * 400).prompt_tokens == 100
    assert read(Completion, prompt=list(range(37))).prompt_tokens == 37
    assert read(Completion, prompt=["one", "two"]).choices == 2
    assert read(Completion, prompt=[[1, 2], [3]]).choices == 2
    assert read(Embedding, input=["a", "b", "c"]).choices == 3


@pytest.mark.parametrize("prompt", [None, "", [], [1, "a"], [[1], "a"], [[1, "a"]], [-1], {"a": 1}, ["x"] * 65])
def test_other_prompts_are_refused(prompt: Any) -> None:
    assert PROMPTS_MAX == 64
    with pytest.raises(ApiError) as refusal:
        read(Completion, prompt=prompt)
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    ("shape", "body"),
    [
        (Chat, {"messages": []}),
        (Chat, {}),
        (Responses, {}),
        (Completion, {"prompt": "x", "max_tokens": 0}),
        (Completion, {"prompt": "x", "max_tokens": -1}),
        (Completion, {"prompt": "x", "max_tokens": "many"}),
    ],
)
def test_a_missing_or_wrong_field_is_a_bad_request(shape: type[Shape], body: Any) -> None:
    with pytest.raises(ApiError) as refusal:
        read(shape, **body)
    assert refusal.value.status == 400
    assert json.loads(refusal.value.body())["error"]["type"] == "BadRequestError"


def test_an_unknown_model_is_not_found_and_the_error_names_it() -> None:
    with pytest.raises(ApiError, match="`unknown` does not exist") as refusal:
        read(Completion, model="unknown", prompt="x")
    assert json.loads(refusal.value.body())["error"]["code"] == 404


def test_base_models_aliases_and_adapters_are_known() -> None:
    assert read(Completion, prompt="x").model == "base"
    assert read(Completion, model="alias", prompt="x").lora is None
    assert read(Completion, model="lora-a", prompt="x").lora == "lora-a"
    listing = json.loads(MODELS.listing(1))["data"]
    assert [(item["id"], item["parent"]) for item in listing] == [("base", None), ("alias", None), ("lora-a", "base")]


def test_models_and_cache_salts_share_no_blocks() -> None:
    plain = read(Completion, prompt="x" * 64)
    assert read(Completion, prompt="x" * 64).hashes == plain.hashes
    assert read(Completion, prompt="x" * 64, model="lora-a").hashes != plain.hashes
    assert read(Completion, prompt="x" * 64, cache_salt="t").hashes != plain.hashes


def test_a_longer_conversation_keeps_its_blocks() -> None:
    start = chat("a" * 200)
    longer = chat("a" * 200, [{"type": "text", "text": "b" * 200}])
    assert len(start.hashes) == 3
    assert longer.hashes[:3] == start.hashes


def test_texts_depend_only_on_prompt_and_seed() -> None:
    first, again, other = (read(Completion, prompt=p) for p in ("x", "x", "y"))
    assert text_of(first) == text_of(again) != text_of(other)
    reseeded = read(Completion, Models(("base",), (), 16, seed=8), prompt="x")
    assert text_of(reseeded) != text_of(first)
    assert text_of(read(Completion, prompt="x", seed=3)) != text_of(first)


def test_a_text_has_one_word_for_each_token() -> None:
    ask = read(Completion, prompt="x", max_tokens=40)
    text = text_of(ask).decode()
    assert len(text.split(" ")) == 40
    assert text.encode() == b"".join(islice(words(ask.origin), 40))


@pytest.mark.parametrize("shape", [Completion, Chat, Responses])
def test_a_streamed_text_equals_the_unstreamed_one(shape: Any) -> None:
    fields = {Completion: "prompt", Responses: "input"}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}]}
    if shape in fields:
        body = {fields[shape]: "q"}
    ask = read(shape, **body)
    one = shape(ask, "1", 5)
    stream = one.opening() + b"".join(one.token(last=n == 15) for n in range(16))
    lines = [line[6:] for line in stream.decode().split("\n") if line.startswith("data: ")]
    text = "".join(piece(json.loads(line)) for line in lines)
    assert text.encode() == text_of(ask)


def piece(event: dict[str, Any]) -> str:
    """The text in an event of any API."""
    if "choices" not in event:
        return str(event.get("delta", ""))
    choice = event["choices"][0]
    return str(choice.get("text") or choice.get("delta", {}).get("content", ""))


def test_usage_counts_prompt_completion_and_cached_tokens() -> None:
    whole = json.loads(Completion(read(Completion, prompt="x" * 40), "1", 5).whole(16))
    assert whole["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 16,
        "total_tokens": 26,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    response = json.loads(Responses(read(Responses, input="x" * 40), "1", 5).whole(16))
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 16}
    assert response["usage"]["total_tokens"] == 26


def test_a_stream_has_usage_only_on_request() -> None:
    without_usage = chat("x", stream=True)
    with_usage = chat("x", stream=True, stream_options={"include_usage": True})
    assert Chat(without_usage, "1", 5).closing(0) == b"data: [DONE]\n\n"
    usage, done = Chat(with_usage, "1", 5).closing(16).split(b"\n\n")[:2]
    assert json.loads(usage[6:])["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert json.loads(usage[6:])["choices"] == []
    assert done == b"data: [DONE]"


def test_a_stream_of_responses_ends_with_the_whole_response() -> None:
    ask = read(Responses, input=[{"role": "user", "content": "q"}], stream=True, instructions="i")
    kind, data = Responses(ask, "1", 5).closing(0).decode().strip().split("\n")
    assert kind == "event: response.completed"
    assert json.loads(data[6:])["response"]["output"][0]["content"][0]["text"]


def test_every_api_answers_with_its_object_type() -> None:
    objects = {}
    for path, shape in SHAPES.items():
        body = {"prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}]}
        objects[path] = json.loads(shape(read(shape, **body), "1", 5).whole(0))["object"]
    assert objects == {
        b"/v1/completions": "text_completion",
        b"/v1/chat/completions": "chat.completion",
        b"/v1/embeddings": "list",
        b"/v1/responses": "response",
    }


def test_embeddings_are_deterministic_numbers_and_are_not_streamed() -> None:
    ask = read(Embedding, input=["a", "b"], stream=True)
    first, second = json.loads(Embedding(ask, "1", 5).whole(0))["data"]
    assert not ask.stream
    assert first["embedding"] != second["embedding"]
    assert all(-1 <= number < 1 for number in first["embedding"])
