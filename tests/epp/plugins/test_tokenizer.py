"""The token producer: the estimate, vLLM's render endpoints, and the prefix producer with tokens."""

import base64
import json
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh64_intdigest

from epp.candidates import Candidates
from epp.decision.decision import Decision, ProfileRun
from epp.errors import ProducerFailed
from epp.plugin import NoParams
from epp.plugins.parsers.anthropic import Anthropic
from epp.plugins.parsers.openai import OpenAI
from epp.plugins.producers._estimate import ITEM_TOKENS_MAX, TOKENS_MAX, image_size
from epp.plugins.producers.approx_prefix import ApproximatePrefix
from epp.plugins.producers.tokenizer import NOT_RENDERED, SCALE_OUT, WARM_UP_TRIES, Tokens
from epp.prefix.match import APPROXIMATE, prefix_match
from epp.request import Request
from epp.request.tokens import NO_TOKENS, TOKENS, Feature, TokenizedPrompt, token_count
from tests.fakes import FakeCall, FakeServices, candidates, request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PARSER = OpenAI("o", NoParams())
MATCH = prefix_match(APPROXIMATE)
C = candidates({"waiting_requests": [0, 0]})


def made(services: FakeServices | None = None, **params: object) -> Tokens:
    plugin = Tokens("token-producer", msgspec.convert(params, Tokens.Params))
    plugin.start(services or FakeServices())
    return plugin


def parsed(path: str, headers: dict[str, str] | None = None, **body: object) -> Request:
    r = Request(id="r", path=path, headers=headers or {}, now=0.0)
    PARSER.parse(r, path, msgspec.json.encode({"model": "m", **body}))
    return r


def chat(*content: Any, **more: Any) -> Request:
    return parsed(CHAT, messages=[{"role": "user", "content": one} for one in content], **more)


def tokens(plugin: Tokens, r: Request) -> TokenizedPrompt | None:
    assert plugin.produce(r, C) is None
    return r[TOKENS]


def packed(text: bytes) -> list[int]:
    """The tokens of a text: 4 bytes each, the last one padded with zeros."""
    text += bytes(-len(text) % 4)
    return list(struct.unpack(f"<{len(text) // 4}I", text))


def only(tokenized: TokenizedPrompt | None) -> tuple[list[int], list[Feature]]:
    assert tokenized is not None
    (prompt,) = tokenized.prompts
    assert prompt.token_ids is not None and prompt.token_ids.dtype == np.uint32
    return prompt.token_ids.tolist(), list(prompt.features)


# The estimate


def test_a_chat_is_its_tools_as_json_followed_by_roles_and_texts_without_separators() -> None:
    r = parsed(
        CHAT,
        tools=[{"b": 1, "a": "x"}],
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "héllo"}, {"type": "text", "text": "!"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        ],
        cache_salt="s",
    )
    result = tokens(made(), r)
    assert only(result)[0] == packed('[{"a":"x","b":1}]systembe briefuserhéllo!assistant'.encode())
    assert result is not None and result.cache_salt == "s"


@pytest.mark.parametrize(
    ("path", "body", "prompts"),
    [
        (COMPLETIONS, {"prompt": "hello"}, [packed(b"hello")]),
        (COMPLETIONS, {"prompt": ["hello", "", "you"]}, [packed(b"hello"), packed(b"you")]),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, [[1, 2, 3]]),
        (COMPLETIONS, {"prompt": [[1, 2], [2**32 - 1]]}, [[1, 2], [2**32 - 1]]),
        ("/v1/embeddings", {"input": ["a", "b"]}, [packed(b'["a","b"]')]),
        ("/v1/embeddings", {"input": [7, 8]}, [[7, 8]]),
        ("/v1/responses", {"input": "hi"}, [packed(b'[{"input":"hi"}]')]),
        (
            "/v1/responses",
            {"input": "hi", "instructions": "be brief", "tools": [1]},
            [packed(b'[{"instructions":"be brief"},{"tools":[1]},{"input":"hi"}]')],
        ),
        ("/v1/conversations", {"items": [{"b": 1, "a": 2}]}, [packed(b'[{"a":2,"b":1}]')]),
        ("/v1/images/generations", {"prompt": "a cat"}, [packed(b"a cat")]),
    ],
)
def test_requests_of_other_apis_have_their_own_texts(
    path: str, body: dict[str, object], prompts: list[list[int]]
) -> None:
    result = tokens(made(), parsed(path, **body))
    assert result is not None
    assert [prompt.token_ids.tolist() for prompt in result.prompts if prompt.token_ids is not None] == prompts
    assert result.count == sum(map(len, prompts))


def test_without_parts_from_the_parser_the_canonical_bytes_are_estimated() -> None:
    r = request(b"hello")
    assert only(tokens(made(), r))[0] == packed(b"hello")
    assert token_count(r) == 2 and token_count(request(b"12345")) == 2


def test_media_start_at_a_whole_token_and_repeat_the_low_bits_of_their_hash() -> None:
    url = "https://pictures/1.png"
    hashed = xxh64_intdigest(url.encode())
    # user + a = 5 bytes -> 2 tokens; 640 * 360 // 1024 = 225 tokens for the image; b is one more.
    content = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "b"},
    ]
    ids, features = only(tokens(made(), chat(content)))
    assert ids == [*packed(b"usera"), *[hashed & 0xFFFFFFFF] * 225, *packed(b"b")]
    assert features == [Feature("image", f"{hashed:x}", 2, 225)]


def test_audio_counts_by_its_data_and_format() -> None:
    # "abcdefgh" + "wav" are 11 characters: 3 tokens.
    block = {"type": "input_audio", "input_audio": {"data": "abcdefgh", "format": "wav"}}
    _, features = only(tokens(made(), chat([block])))
    assert features == [Feature("audio", f"{xxh64_intdigest(b'abcdefghwav'):x}", 1, 3)]


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height) + bytes(9)


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + bytes(3)


def jpeg(width: int, height: int) -> bytes:
    comment = b"\xff\xfe" + struct.pack(">H", 1002) + bytes(1000)
    return b"\xff\xd8" + comment + b"\xff\xc2" + struct.pack(">HBHHB", 17, 8, height, width, 3) + bytes(20)


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("picture", [png, gif, jpeg])
def test_the_size_of_an_image_is_read_from_its_header(picture: Any) -> None:
    assert image_size(data_url(picture(320, 64))) == (320, 64)
    block = {"type": "image_url", "image_url": {"url": data_url(picture(320, 64))}}
    assert only(tokens(made(), chat([block])))[1][0].length == 320 * 64 // 1024


@pytest.mark.parametrize(
    "url", ["", "https://a/b.png", "data:image/png;base64,", "data:image/png,x", data_url(b"?" * 30)]
)
def test_an_image_without_a_readable_header_has_no_size(url: str) -> None:
    assert image_size(url) is None


@given(st.binary(max_size=300))
def test_no_image_header_breaks_the_estimate(data: bytes) -> None:
    for start in (b"", b"\xff\xd8", b"\xff\xd8\xff\xe0\x00\x00", b"GIF89a", b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR"):
        size = image_size(data_url(start + data))
        assert size is None or min(size) > 0


@pytest.mark.parametrize(
    ("image", "count"),
    [
        ({}, 225),
        ({"mode": "static", "static": {"staticToken": 99}}, 99),
        ({"mode": "static"}, 1),
        ({"dynamic": {"factor": 256}}, 900),
        ({"defaultResolution": {"width": 1024, "height": 10}}, 10),
        ({"defaultResolution": {"width": 1, "height": 1}}, 1),
    ],
)
def test_image_parameters_determine_the_tokens_of_an_image(image: dict[str, object], count: int) -> None:
    block = {"type": "image_url", "image_url": {"url": "https://a/b.png"}}
    assert only(tokens(made(estimate={"image": image}), chat([block])))[1][0].length == count


@pytest.mark.parametrize(
    ("video", "headers", "count"),
    [
        ({}, {}, 20 * 225),  # 10 s * 2 frames
        ({}, {"x-llm-d-video-duration-seconds": "3"}, 6 * 225),
        ({}, {"x-llm-d-video-resolution": "1024X4"}, 20 * 4),
        ({}, {"x-llm-d-video-duration-seconds": "-1", "x-llm-d-video-resolution": "wide"}, 20 * 225),
        ({"frames": {"sampled": {"temporalPatchSize": 2}}}, {}, 10 * 225),
        ({"frames": {"maxFrames": 7, "sampled": {"temporalPatchSize": 2}}}, {}, 3 * 225),
        ({"frames": {"mode": "strided"}}, {}, 240 * 225),
        ({"frames": {"mode": "strided", "strided": {"frameStride": 24}}}, {"x-llm-d-video-fps": "48"}, 20 * 225),
        ({"frames": {"mode": "strided", "minFrames": 500}, "maxVideoTokens": 1000}, {}, 1000),
        ({"tokensPerFrame": {"mode": "static", "static": {"numTokensPerFrame": 5}}}, {}, 100),
        ({"defaultDuration": 1.6}, {}, 3 * 225),
        ({}, {"x-llm-d-video-duration-seconds": "1e300"}, ITEM_TOKENS_MAX),
        ({}, {"x-llm-d-video-duration-seconds": "inf", "x-llm-d-video-fps": "nan"}, 20 * 225),
    ],
)
def test_video_parameters_and_request_headers_determine_the_tokens_of_a_video(
    video: dict[str, object], headers: dict[str, str], count: int
) -> None:
    r = chat([{"type": "video_url", "video_url": {"url": "https://a/b.mp4"}}])
    r.headers = headers
    assert only(tokens(made(estimate={"video": video}), r))[1][0].length == count


def test_the_media_tokens_of_one_request_are_bounded() -> None:
    block = {"type": "video_url", "video_url": {"url": "https://a/b.mp4"}}
    r = chat([block] * 20)
    r.headers = {"x-llm-d-video-duration-seconds": "1e9"}
    _, features = only(tokens(made(), r))
    assert len(features) == 20 and sum(feature.length for feature in features) <= TOKENS_MAX + 20


# Parameters


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"udsTokenizerConfig": {"socketFile": "/x"}}, "udsTokenizerConfig: a tokenizer behind a Unix socket is not"),
        ({"vllm": {}}, "vllm: 'modelName' must name the model"),
        ({"estimate": {}, "modelName": "m"}, "estimate: cannot be combined with 'vllm' or 'modelName'"),
        ({"modelName": "m", "vllm": {"timeout": "5"}}, "vllm.timeout: '5' is not a duration"),
        ({"modelName": "m", "vllm": {"mmTimeout": "0s"}}, "vllm.mmTimeout: '0s' is not above 0"),
        ({"modelName": "m", "vllm": {"url": "unix:///x"}}, "vllm.url: 'unix:///x' is not a URL"),
    ],
)
def test_invalid_parameters_are_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tokens("t", msgspec.convert(params, Tokens.Params))


# vLLM


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
    assert sent == {
        "messages": [{"role": "user", "content": "hello"}],
        "chat_template_kwargs": {"x": 1.5},
        "cache_salt": "s",
    }
    features = {
        "mm_hashes": {"image": ["a", "b"], "audio": ["c"]},
        "mm_placeholders": {"image": [{"offset": 9, "length": 2}, {"offset": 0, "length": 1}], "video": []},
    }
    call.answer(json.dumps({"token_ids": [5, 6, 4294967295], "features": features, "model": "x"}).encode())
    assert only(r[TOKENS]) == (
        [5, 6, 4294967295],
        [Feature("image", "b", 0, 1), Feature("image", "a", 9, 2)],
    )
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
        (OSError("POST http://localhost:8000/x: refused"), "refused", "no answer from PATH: compare vllm.url"),
        (
            TimeoutError("POST http://localhost:8000/x: not done within 5 s"),
            "not done within 5 s",
            "no answer in time from PATH: raise vllm.timeout",
        ),
    ],
)
def test_a_failed_call_leaves_no_tokens_and_its_reason_is_kept_and_counted(
    answer: Any, message: str, reason: str
) -> None:
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


# The prefix producer


def decided(c: Candidates, index: int) -> Decision:
    run = ProfileRun(c, c.zeros(), [index])
    return Decision(run.targets, {"default": run}, "default")


class Prefixes:
    """A prefix producer with an index."""

    def __init__(self) -> None:
        self.services = FakeServices()
        self.plugin = ApproximatePrefix(APPROXIMATE, ApproximatePrefix.Params())
        self.plugin.start(self.services)

    def matched(self, r: Request) -> tuple[list[float], int]:
        self.plugin.produce(r, C)
        match = r[MATCH]
        assert match is not None
        return [0.0, 0.0] if match.blocks is None else match.blocks.tolist(), match.total


def tokenized(*prompts: list[int]) -> Request:
    tokenised = parsed(COMPLETIONS, prompt=list(prompts))
    made().produce(tokenised, C)
    r = request(b"the same bytes for all")
    r[TOKENS] = tokenised[TOKENS]  # type: ignore[assignment]
    return r


def test_prefixes_are_matched_by_tokens_if_there_are_some() -> None:
    prefixes = Prefixes()
    first = tokenized(list(range(200)))
    assert prefixes.matched(first) == ([0, 0], 4)  # 64 + 64 + 64 + 8 tokens
    prefixes.plugin.before_send(first, decided(C, 1))
    assert prefixes.matched(tokenized([*range(128), 7, 8])) == ([0, 2], 3)
    assert prefixes.matched(tokenized([9, *range(199)])) == ([0, 0], 4)
    assert prefixes.matched(request(b"the same bytes for all")) == ([0, 0], 1)


def test_prompts_of_one_request_match_separately_and_add_up() -> None:
    prefixes = Prefixes()
    one, other = list(range(128)), list(range(1000, 1128))
    both = tokenized(one, other)
    assert prefixes.matched(both) == ([0, 0], 4)
    prefixes.plugin.before_send(both, decided(C, 0))
    assert prefixes.matched(tokenized(other, one)) == ([4, 0], 4)
    assert prefixes.matched(tokenized(other)) == ([2, 0], 2)
