"""The token producer asks a vLLM server: which endpoint for which body, and what becomes of a request if it fails."""

import json
from typing import Any

import msgspec
import pytest

from epp.errors import ProducerFailed
from epp.plugin import NoParams
from epp.plugins.parsers.anthropic import Anthropic
from epp.plugins.producers.tokenizer import NOT_RENDERED, SCALE_OUT, WARM_UP_TRIES
from epp.request import Request
from epp.request.tokens import NO_TOKENS, TOKENS, Feature
from tests.epp.plugins.test_tokenizer import CHAT, COMPLETIONS, C, chat, made, only, parsed, tokens
from tests.fakes import FakeCall, FakeServices


class Vllm:
    """A producer with a server that the test plays."""

    def __init__(self, **vllm: str) -> None:
        self.services = FakeServices()
        self.plugin = made(self.services, modelName="base-model", vllm=vllm)
        (self.warm_up,) = self.services.asked
        del self.services.asked[:]

    @property
    def without(self) -> dict[tuple[str, ...], int]:
        """How many requests and warm-ups had no tokens: (server, reason) -> number."""
        return dict(self.services.counted["requests_without_tokens_total"].values)

    def call(self, r: Request) -> FakeCall:
        self.waiting = self.plugin.produce(r, C)
        assert self.waiting is not None
        (call,) = self.services.asked
        return call


def test_a_chat_is_rendered_unchanged_except_for_the_model() -> None:
    vllm = Vllm(url="http://render:8000/")
    r = chat("hello", chat_template_kwargs={"x": 1.50}, cache_salt="s")
    call = vllm.call(r)
    assert (call.method, call.url, call.timeout_s) == ("POST", "http://render:8000/v1/chat/completions/render", 5.0)
    sent = json.loads(call.body)
    assert sent.pop("model") == "base-model"
    assert sent == {"messages": [{"role": "user", "content": "hello"}], "chat_template_kwargs": {"x": 1.5}, "cache_salt": "s"}
    features = {
        "mm_hashes": {"image": ["a", "b"], "audio": ["c"]},
        "mm_placeholders": {"image": [{"offset": 9, "length": 2}, {"offset": 0, "length": 1}], "video": []},
    }
    call.answer(json.dumps({"token_ids": [5, 6, 4294967295], "features": features, "model": "x"}).encode())
    assert only(r[TOKENS]) == ([5, 6, 4294967295], [Feature("image", "b", 0, 1), Feature("image", "a", 9, 2)])
    result = r[TOKENS]
    assert result is not None and result.cache_salt == "s"


def test_messages_with_parts_have_a_longer_timeout() -> None:
    vllm = Vllm(timeout="1s", mmTimeout="1m30s")
    assert vllm.call(chat("a", [{"type": "text", "text": "b"}])).timeout_s == 90.0


def test_each_prompt_of_a_completion_is_rendered() -> None:
    vllm = Vllm()
    r = parsed(COMPLETIONS, prompt=["a", "b"])
    call = vllm.call(r)
    assert call.url == "http://localhost:8000/v1/completions/render"
    call.answer(b'[{"token_ids":[1,2]},{"token_ids":[3]}]')
    result = r[TOKENS]
    assert result is not None and result.count == 3 and len(result.prompts) == 2


def test_messages_are_rendered_as_they_are_and_as_a_chat_where_the_server_does_not_know_them() -> None:
    vllm = Vllm()

    def asked() -> Request:
        r = Request(id="r", path="/v1/messages", headers={}, now=0.0)
        body = {"model": "m", "max_tokens": 9, "system": "be brief", "messages": [{"role": "user", "content": "hi"}]}
        Anthropic("a", NoParams()).parse(r, r.path, msgspec.json.encode(body))
        return r

    first = asked()
    call = vllm.call(first)
    assert call.url == "http://localhost:8000/v1/messages/render"
    assert json.loads(call.body)["system"] == "be brief"
    call.answer(b'{"token_ids":[1,2]}')
    assert only(first[TOKENS])[0] == [1, 2]
    second = asked()
    vllm.plugin.produce(second, C)
    vllm.services.asked[1].answer(b"no such path", 404)
    vllm.services.asked[2].answer(b'{"token_ids":[3]}')
    assert only(second[TOKENS])[0] == [3]
    vllm.plugin.produce(asked(), C)
    chats = vllm.services.asked[2:]
    assert [chat.url for chat in chats] == ["http://localhost:8000/v1/chat/completions/render"] * 2
    assert [each["role"] for each in json.loads(chats[0].body)["messages"]] == ["system", "user"]
    assert vllm.without == {}


def test_a_response_is_rendered_unless_it_continues_what_the_server_has_stored() -> None:
    vllm = Vllm()
    r = parsed("/v1/responses", input="hello", instructions="be brief")
    call = vllm.call(r)
    assert (call.url, call.timeout_s) == ("http://localhost:8000/v1/responses/render", 5.0)
    assert json.loads(call.body) == {"model": "base-model", "input": "hello", "instructions": "be brief"}
    call.answer(b'{"token_ids":[1,2]}')
    assert only(r[TOKENS])[0] == [1, 2]
    for stored in ({"previous_response_id": "resp_1"}, {"conversation": "conv_1"}, {"prompt": {"id": "p"}}):
        continued = parsed("/v1/responses", input="hello", **stored)
        assert tokens(vllm.plugin, continued) is None
        assert continued[NO_TOKENS] == NOT_RENDERED


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "hello"}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}], "tools": [{"a": 1}]}),
    ],
)
def test_where_rendering_is_refused_plain_texts_and_chats_are_tokenized(path: str, body: dict[str, Any]) -> None:
    vllm = Vllm()
    first, second = parsed(path, **body), parsed(path, **body)
    vllm.call(first).answer(b"start it with --enable-scale-out", 403)
    _, call = vllm.services.asked
    assert call.url == "http://localhost:8000/tokenize"
    assert json.loads(call.body) == {"model": "base-model", **body}
    call.answer(b'{"count":2,"max_model_len":99,"tokens":[1,2]}')
    assert only(first[TOKENS]) == ([1, 2], [])
    vllm.plugin.produce(second, C)
    *_, again = vllm.services.asked
    assert (len(vllm.services.asked), again.url) == (3, "http://localhost:8000/tokenize")  # not refused once more
    again.answer(b"gone", 500)
    assert second[TOKENS] is None and second[NO_TOKENS] == f"403 from {path}/render: {SCALE_OUT}"
    vllm.plugin.produce(parsed(path, **body), C)
    assert vllm.services.asked[-1].url == f"http://localhost:8000{path}/render"  # it is asked again
    assert vllm.without == {("localhost:8000", f"403 from {path}/render: {SCALE_OUT}"): 1}


@pytest.mark.parametrize(
    "r",
    [
        parsed(COMPLETIONS, prompt=["a", "b"]),
        parsed("/v1/responses", input="a"),
        parsed(CHAT, messages=[{"role": "user", "content": "a"}], reasoning_effort="high"),
        chat([{"type": "image_url", "image_url": {"url": "https://a/b.png"}}]),
    ],
)
def test_what_tokenize_would_cut_otherwise_has_no_tokens_where_rendering_is_refused(r: Request) -> None:
    vllm = Vllm()
    vllm.call(r).answer(b"off", 403)
    assert len(vllm.services.asked) == 1
    assert r[TOKENS] is None and r[NO_TOKENS].startswith("403 from ")


def test_token_ids_in_the_request_are_used_and_a_request_that_cannot_be_rendered_has_none() -> None:
    vllm = Vllm()
    assert only(tokens(vllm.plugin, parsed(COMPLETIONS, prompt=[1, 2])))[0] == [1, 2]
    embedding = parsed("/v1/embeddings", input="a")
    assert tokens(vllm.plugin, embedding) is None
    assert embedding[NO_TOKENS] == NOT_RENDERED
    assert vllm.without == {("", NOT_RENDERED): 1}
    assert vllm.services.asked == []


@pytest.mark.parametrize(
    ("answer", "message", "reason"),
    [
        # The error text may quote the prompt.
        ((b"cannot make anything of 'hello'", 422), "answered 422$", "422 from PATH: the log of the server may say why"),
        ((b"off", 403), "answered 403$", "403 from PATH: start vLLM with --enable-scale-out"),
        ((b"off", 404), "answered 404$", "404 from PATH: start vLLM with --enable-scale-out, and compare modelName"),
        ((b"off", 501), "answered 501$", "501 from PATH: start vLLM with --enable-scale-out"),
        ((b"{}", 200), "not a rendered prompt", "no token ids from PATH: compare vllm.url"),
        ((b'{"token_ids":[-1]}', 200), "not a rendered prompt", "no token ids from PATH: compare vllm.url"),
        ((b'{"token_ids":[1],"more":' + b"[" * 100_000, 200), "not a rendered prompt", "no token ids from PATH: compare vllm.url"),
        (OSError("POST http://localhost:8000/x: refused"), "refused", "no answer from PATH: compare vllm.url"),
        (
            TimeoutError("POST http://localhost:8000/x: not done within 5 s"),
            "not done within 5 s",
            "no answer in time from PATH: raise vllm.timeout",
        ),
    ],
)
def test_a_failed_call_leaves_no_tokens_and_its_reason_is_kept_and_counted(answer: Any, message: str, reason: str) -> None:
    vllm = Vllm(url="http://user:secret@render:8000")
    r = chat("hello")
    call = vllm.call(r)
    if isinstance(answer, Exception):
        call.finish(problem=answer)
    else:
        call.answer(*answer)
        for tokenize in vllm.services.asked[1:]:
            tokenize.answer(b"no such path", 404)

    async def decide() -> None:
        assert vllm.waiting is not None
        await vllm.waiting

    with pytest.raises(ProducerFailed, match=message):
        decide().send(None)
    assert r[TOKENS] is None
    assert r[NO_TOKENS] == reason.replace("PATH", "/v1/chat/completions/render")
    assert vllm.without == {("render:8000", r[NO_TOKENS]): 1}


def test_a_refused_warm_up_counts_before_a_request_comes_and_a_server_that_starts_does_not() -> None:
    vllm = Vllm()
    vllm.warm_up.finish(problem=OSError("refused"))
    assert vllm.without == {}
    ((_, again),) = vllm.services.periodic
    again()
    vllm.services.asked[0].answer(b"off", 403)
    vllm.services.asked[1].answer(b"off", 404)
    assert vllm.without == {("localhost:8000", f"403 from /v1/chat/completions/render: {SCALE_OUT}"): 1}


def test_it_sends_warm_ups_until_the_server_answers_then_one_with_an_image() -> None:
    vllm = Vllm()
    ((seconds, again),) = vllm.services.periodic
    assert seconds == 5.0
    vllm.warm_up.finish(problem=OSError("refused"))
    again()
    (second,) = vllm.services.asked
    second.answer(b'{"token_ids":[1]}')
    picture = vllm.services.asked[1]
    assert b"image_url" in picture.body and picture.timeout_s == 30.0
    picture.finish(problem=OSError("no image support"))
    again()
    assert len(vllm.services.asked) == 2
    assert vllm.services.warned == []


def test_it_stops_sending_warm_ups_after_some_tries_and_logs_it() -> None:
    vllm = Vllm()
    ((_, again),) = vllm.services.periodic
    vllm.warm_up.finish(problem=OSError("refused"))
    for _ in range(WARM_UP_TRIES + 3):
        again()
        for call in vllm.services.asked:
            if not call.done:
                call.finish(problem=OSError("refused"))
    assert len(vllm.services.asked) == WARM_UP_TRIES - 1
    assert len(vllm.services.warned) == 1 and f"tries={WARM_UP_TRIES}" in vllm.services.warned[0]


def test_the_servers_error_about_a_warm_up_is_logged() -> None:
    vllm = Vllm()
    ((_, again),) = vllm.services.periodic
    vllm.warm_up.answer(b"no such model", 404)
    for _ in range(WARM_UP_TRIES):
        again()
        for call in vllm.services.asked:
            if not call.done:
                call.answer(b"no such model", 404)
    assert vllm.services.warned[0].endswith("answered 404: no such model")
