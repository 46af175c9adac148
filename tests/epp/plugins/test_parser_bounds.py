"""Bodies with very many small values: individual processing is bounded, and prompts with equal beginnings stay equal behind each bound."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from epp.plugins.parsers._canonical import OBJECTS_MAX, SHORTENED_BYTES, SORTED_BYTES, SURE_BYTES, crowded
from epp.plugins.parsers._parts import OPENED_MAX, SEPARATED_MAX
from epp.plugins.parsers._plain_prompts import IDS_MAX, TEXTS_MAX
from epp.plugins.parsers._tokens import REST_BYTES_MAX
from epp.plugins.parsers.anthropic import Anthropic
from epp.plugins.parsers.openai import OpenAI
from epp.plugins.parsers.sglang_http import SglangHttp
from epp.plugins.parsers.vllm_grpc import GENERATE, VllmGrpc
from epp.plugins.parsers.vllm_http import VllmHttp
from tests.epp.plugins.parser_bodies import field, frame, packed, parsed, refusal

MANY = 40_000
CHAT = "/v1/chat/completions"


def chat(messages: list[object], **more: object) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


def canonical(body: bytes, path: str = CHAT) -> bytes:
    return parsed(Anthropic if "messages" in path else OpenAI, path, body).prompt.canonical


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_a_crowded_conversation_that_grows_keeps_all_its_bytes(path: str) -> None:
    messages: list[object] = [{"role": "user", "content": f"turn {n}"} for n in range(MANY)]
    short, long_ = canonical(chat(messages), path), canonical(chat([*messages, {"role": "user", "content": "x"}]), path)
    assert long_.startswith(short)
    assert len(short) > 20 * MANY


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
@pytest.mark.parametrize("messages", ["[]", "null", "{}", '""'])
def test_a_crowded_body_without_messages_is_refused_like_any_other(path: str, messages: str) -> None:
    crowd = ",".join(["{}"] * MANY)
    body = b'{"model":"m","x":[%b],"messages":%b}' % (crowd.encode(), messages.encode())
    assert crowded(body)
    assert refusal(Anthropic if "messages" in path else OpenAI, path, body).startswith("invalid")


def test_code_and_tools_do_not_make_a_body_crowded_but_objects_in_lists_do() -> None:
    code = "if (x) {\n  call({a: 1}, () => {});\n}\n" * 20_000
    assert not crowded(chat([{"role": "user", "content": code.replace("{}", "{ return }").replace("{ ", "{")}]))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": {"b": {"c": {}}}}}} for _ in range(OBJECTS_MAX // 2)]
    assert not crowded(chat([{"role": "user", "content": "hi"}], tools=tools))
    for separators in ((",", ":"), (", ", ": "), (" ,\n", " :\t")):
        assert crowded(json.dumps({"messages": [{"role": "user"}] * MANY}, separators=separators).encode())
    assert crowded(b'{"messages":[' + b"{}," * MANY + b"{}]}")


def test_a_crowded_list_of_items_that_grows_keeps_all_its_bytes() -> None:
    items = [{"role": "user", "content": f"turn {n}"} for n in range(MANY)]
    one = canonical(json.dumps({"model": "m", "input": items}).encode(), "/v1/responses")
    other = canonical(json.dumps({"model": "m", "input": [*items, {"role": "user"}]}).encode(), "/v1/responses")
    assert other.startswith(one)


def test_very_many_prompts_count_as_their_json_and_a_single_one_as_its_text() -> None:
    texts = [f"prompt {n}" for n in range(TEXTS_MAX * 4)]
    made = canonical(json.dumps({"model": "m", "prompt": texts}).encode(), "/v1/completions")
    assert made.startswith(b"prompt 0") and made.endswith(b"prompt %d" % (len(texts) - 1))
    prose = "one, two, three, " * TEXTS_MAX
    alone = canonical(json.dumps({"model": "m", "prompt": [prose]}).encode(), "/v1/completions")
    assert alone == canonical(json.dumps({"model": "m", "prompt": prose}).encode(), "/v1/completions")


def by_openai(ids: list[int]) -> tuple[bytes, list[int]]:
    prompt = parsed(OpenAI, "/v1/completions", {"model": "m", "prompt": ids}).prompt
    return prompt.canonical, list(prompt.parts().token_ids[0])


def by_vllm(ids: list[int]) -> tuple[bytes, list[int]]:
    prompt = parsed(VllmHttp, "/inference/v1/generate", {"model": "m", "token_ids": ids}).prompt
    return prompt.canonical, list(prompt.parts().token_ids[0])


def by_sglang(ids: list[int]) -> tuple[bytes, list[int]]:
    prompt = parsed(SglangHttp, "/generate", {"input_ids": ids}).prompt
    return prompt.canonical, list(prompt.parts().token_ids[0])


def by_grpc(ids: list[int]) -> tuple[bytes, list[int]]:
    prompt = parsed(VllmGrpc, "/" + GENERATE, frame(field(2, packed(2, ids)))).prompt
    return prompt.canonical, list(prompt.parts().token_ids[0])


@pytest.mark.parametrize("by", [by_openai, by_vllm, by_sglang, by_grpc])
@pytest.mark.parametrize("count", [IDS_MAX - 1, IDS_MAX, IDS_MAX + 1, 3 * IDS_MAX])
def test_the_first_of_many_token_ids_are_hashed_as_words_and_the_parts_have_all(
    by: Callable[[list[int]], tuple[bytes, list[int]]], count: int
) -> None:
    ids = [(n * 7919) % 150_000 for n in range(count)]
    made, all_ids = by(ids)
    assert all_ids == ids
    head = np.array(ids[:IDS_MAX], "<u4").tobytes()
    assert made.startswith(head)
    longer, _ = by([*ids, 5])
    assert longer[: len(head)] == head
    if count > IDS_MAX:
        assert longer.startswith(made)


LISTS = b"[" + b"[]," * OPENED_MAX + b"[]]"
MEMBERS = b"{" + b",".join(b'"%x":0' % number for number in range(SEPARATED_MAX + 2)) + b"}"


@pytest.mark.parametrize("values", [LISTS, MEMBERS], ids=["lists", "members"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b'{"model":"m","messages":[{"role":"user","content":%b}]}'),
        (CHAT, b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[%b]}'),
        ("/v1/messages", b'{"model":"m","messages":[{"role":"user","content":[%b]}]}'),
        ("/v1/responses", b'{"model":"m","input":[%b]}'),
        ("/v1/conversations", b'{"model":"m","items":[%b]}'),
    ],
)
def test_a_body_with_very_many_values_is_accepted_and_has_no_parts(path: str, body: bytes, values: bytes) -> None:
    prompt = parsed(Anthropic if path == "/v1/messages" else OpenAI, path, body % values).prompt
    with pytest.raises(ValueError, match="it has more than"):
        prompt.parts()


def test_a_long_text_of_code_and_a_long_list_of_token_ids_have_parts() -> None:
    code = "for (let i = 0; i < n; i += 1) {\n  a[i] = f(b[i], c);\n}\n" * 40_000  # 2 MB
    assert parsed(OpenAI, CHAT, chat([{"role": "user", "content": code}])).prompt.parts().prompts[0][1] == code.encode()
    ids = [151_643] * 900_000
    assert by_openai(ids)[1] == by_vllm(ids)[1] == by_grpc(ids)[1] == ids


@pytest.mark.parametrize("by", [by_openai, by_vllm, by_sglang, by_grpc])
def test_a_list_of_very_many_token_ids_has_no_parts(by: Callable[[list[int]], tuple[bytes, list[int]]]) -> None:
    with pytest.raises(ValueError, match="it has more than"):
        by([1 << 31] * (REST_BYTES_MAX // 5 + IDS_MAX + 1))  # 5 bytes in a varint, and more in JSON


def test_an_invalid_id_among_the_first_is_refused() -> None:
    ids = ",".join(["1"] * 100 + ["-1"] + ["1"] * (2 * IDS_MAX))
    assert "integer" in refusal(SglangHttp, "/generate", b'{"input_ids":[%b]}' % ids.encode())
    assert refusal(OpenAI, "/v1/completions", b'{"model":"m","prompt":[%b]}' % ids.encode())
    assert refusal(VllmHttp, "/inference/v1/generate", b'{"model":"m","token_ids":[%b]}' % ids.encode())


@pytest.mark.parametrize("word", ["\\u0068ello ", "\\u4f60\\u597d", "\\ud83d\\ude00"])
def test_only_the_beginning_of_a_long_text_is_shortened_and_growth_keeps_it(word: str) -> None:
    text = word * (2 * SHORTENED_BYTES // len(word))
    body = b'{"model":"m","prompt":"%b"}'
    one = canonical(body % text.encode(), "/v1/completions")
    other = canonical(body % (text + word).encode(), "/v1/completions")
    assert other.startswith(one)
    short = canonical(body % (word * 100).encode(), "/v1/completions")
    assert one.startswith(short) and b"\\u" not in short and one.endswith(word.encode())


def test_unreadable_parts_of_unknown_types_add_only_their_own_bytes() -> None:
    parts = ",".join(['{"type":"x","y":[1,2]}'] * 500 + ['{"type":"x","y":"\xff","cache_control":{}}'])
    body = b'{"model":"m","messages":[{"role":"user","content":[%b]}]}' % parts.encode("latin-1")
    assert len(canonical(body)) < 3 * len(body)


def test_a_bounded_number_of_bytes_is_sorted() -> None:
    members = {f"key{n}": n for n in range(SORTED_BYTES)}
    body = chat([{"role": "user", "content": dict(reversed(members.items()))}])
    assert json.dumps(dict(reversed(members.items()))).encode() in canonical(body)


@pytest.mark.parametrize("value", ["[]", "1", '""'])
def test_a_part_with_very_many_values_counts_as_its_json_and_keeps_the_bytes_before_it(value: str) -> None:
    def body(values: int, more: str = "") -> bytes:
        image = '{"type":"image_url","image_url":{"x":[' + ",".join([value] * values) + "]}}"
        return chat([{"role": "user", "content": "hi"}]).replace(b"}]}", b'},{"role":"user","content":[%b%b]}]}') % (
            image.encode(),
            more.encode(),
        )

    many, few = canonical(body(SURE_BYTES)), canonical(body(2))
    assert many.endswith(b",".join([value.encode()] * 9) + b"]}}]")
    assert not few.endswith(b"]")
    assert many[: many.index(b"[")] == few[: many.index(b"[")]
    assert canonical(body(SURE_BYTES, ',{"type":"text","text":"x"}')).startswith(many[:-1])
