"""The token producer: the estimate, and the prefix producer with tokens."""

import base64
import re
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
from epp.plugin import NoParams
from epp.plugins.parsers.openai import OpenAI
from epp.plugins.producers._estimate import ITEM_TOKENS_MAX, TOKENS_MAX, Settings, image_size
from epp.plugins.producers.approx_prefix import ApproximatePrefix
from epp.plugins.producers.tokenizer import ESTIMATED, Tokens
from epp.prefix.match import APPROXIMATE, prefix_match
from epp.request import Request
from epp.request.tokens import NO_TOKENS, TOKENS, Feature, TokenizedPrompt, token_count
from tests.cases import cases
from tests.fakes import FakeServices, candidates, request

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


@cases(
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
def test_requests_of_other_apis_have_their_own_texts(path: str, body: dict[str, object], prompts: list[list[int]]) -> None:
    result = tokens(made(), parsed(path, **body))
    assert result is not None
    assert [prompt.token_ids.tolist() for prompt in result.prompts if prompt.token_ids is not None] == prompts
    assert result.count == sum(map(len, prompts))


def test_estimated_tokens_are_said_to_be_estimated_and_those_that_a_client_sends_are_not() -> None:
    estimated, sent = parsed(COMPLETIONS, prompt="hello"), parsed(COMPLETIONS, prompt=[1, 2, 3])
    for r in (estimated, sent):
        assert tokens(made(), r) is not None
    assert estimated[NO_TOKENS] == ESTIMATED and not sent[NO_TOKENS]


def test_without_parts_from_the_parser_the_canonical_bytes_are_estimated() -> None:
    r = request(b"hello")
    assert only(tokens(made(), r))[0] == packed(b"hello")
    assert token_count(r) == 2 and token_count(request(b"12345")) == 2


def test_media_start_at_a_whole_token_and_repeat_the_low_bits_of_their_hash() -> None:
    url = "https://pictures/1.png"
    hashed = xxh64_intdigest(url.encode())
    # user + a = 5 bytes -> 2 tokens; 640 * 360 // 1024 = 225 tokens for the image; b is one more.
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "b"}]
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


@pytest.mark.parametrize("url", ["", "https://a/b.png", "data:image/png;base64,", "data:image/png,x", data_url(b"?" * 30)])
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
        ({"mode": "static", "static": {"staticToken": -5}}, 1),
        ({"dynamic": {"factor": -1}, "defaultResolution": {"width": -1, "height": -1}}, 640 * 360 // 1024),
        ({"dynamic": {"factor": 256}}, 900),
        ({"defaultResolution": {"width": 1024, "height": 10}}, 10),
        ({"defaultResolution": {"width": 1, "height": 1}}, 1),
    ],
)
def test_image_parameters_determine_the_tokens_of_an_image(image: dict[str, object], count: int) -> None:
    block = {"type": "image_url", "image_url": {"url": "https://a/b.png"}}
    assert only(tokens(made(estimate={"image": image}), chat([block])))[1][0].length == count


@cases(
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
        ({"tokensPerFrame": {"mode": "static", "static": {"numTokensPerFrame": -5}}}, {}, 20),
        ({"frames": {"minFrames": -1, "maxFrames": -1, "sampled": {"sampleFPS": -1, "temporalPatchSize": -1}}}, {}, 10 * 2 * 225),
        ({"frames": {"mode": "strided", "strided": {"defaultSourceFPS": -1, "frameStride": -1}}, "maxVideoTokens": -1}, {}, 240 * 225),
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


def test_the_description_of_each_number_of_the_estimate_says_what_0_or_less_means() -> None:
    parts = Settings.__subclasses__()
    numbers = [(part, field.name) for part in parts for field in msgspec.structs.fields(part) if field.type in (int, float)]
    assert numbers
    for part, name in numbers:
        assert re.search(rf"\n    {name}: [^\n]*; 0 or less means (no limit|[0-9]+)\.\n", part.__doc__ or ""), (part, name)


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
