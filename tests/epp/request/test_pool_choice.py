"""Which pool gets a request: the order of port, authority, metadata and model, and what their matchers match."""

import codecs
import fnmatch
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.errors import Cause, ProtocolViolation, Refused
from epp.protocol import refusals
from epp.request import pool_choice
from epp.request.pool_choice import (
    KEPT_CHARS_MAX,
    KEPT_MAX,
    SHOWN_MAX,
    UNDECIDED,
    Matched,
    Pattern,
    PoolChoice,
    host_of,
    model_of,
    no_such_pool,
)
from loadtest.load.proto import ext_proc_pb2 as pb
from tests.cases import cases

CHOICE = PoolChoice(
    [
        Matched("llama", port=9102),
        Matched("qwen", authorities=("qwen-epp.*", "other.svc:9002")),
        Matched("small", port=9103, authorities=("other.svc",), models=("phi-*", "gemma-2b")),
        Matched("rest", models=("phi-4", "*-b", "*")),
    ]
)


def message(metadata: dict[str, object] | None) -> bytes:
    sent = pb.ProcessingRequest()
    sent.request_headers.end_of_stream = False
    if metadata is not None:
        sent.metadata_context.filter_metadata["envoy.lb"].update(metadata)
    return sent.SerializeToString()


@cases(
    ("port", "authority", "pool"),
    [
        (9102, "", 0),
        (9102, "qwen-epp.ns", 0),  # the port counts before the authority
        (9002, "qwen-epp.ns.svc:9002", 1),
        (9002, "QWEN-epp.NS", 1),
        (9002, "qwen-epp", UNDECIDED),
        (9002, "other.svc", 2),
        (9002, "other.svc:9999", 2),
        (9002, "other.svc:9002", 1),  # a matcher with the port counts before one without
        (9002, "third.svc", UNDECIDED),
        (0, "", UNDECIDED),
    ],
)
def test_a_stream_has_the_pool_of_its_port_or_else_of_its_authority(port: int, authority: str, pool: int) -> None:
    assert [CHOICE.of_stream(port, authority) for _ in range(2)] == [pool, pool]


@pytest.mark.parametrize(("model", "pool"), [("phi-3", 2), ("phi-", 2), ("gemma-2b", 2), ("phi-4", 3), ("x-b", 3), ("Phi-3", 3)])
def test_an_exact_model_counts_before_the_first_pattern_that_fits(model: str, pool: int) -> None:
    assert [CHOICE.of_model(model) for _ in range(2)] == [pool, pool]


@pytest.mark.parametrize(
    ("metadata", "pool"), [(None, UNDECIDED), ({}, UNDECIDED), ({"llm-d.ai/pool": "qwen"}, 1), ({"other": "x"}, UNDECIDED)]
)
def test_the_gateway_may_name_the_pool_in_its_metadata(metadata: dict[str, object] | None, pool: int) -> None:
    assert CHOICE.of_metadata(message(metadata)) == pool


def test_a_pool_in_metadata_that_does_not_exist_is_refused() -> None:
    with pytest.raises(Refused, match="no-pool: there is no pool 'none'; pools: llama, qwen, small, rest"):
        CHOICE.of_metadata(message({pool_choice.KEY: "none"}))


def test_malformed_metadata_end_the_stream() -> None:
    with pytest.raises(ProtocolViolation):
        CHOICE.of_metadata(b"\x42\x0aenvoy.lb\xff\xff")


def test_a_refusal_is_a_404_that_names_the_model_and_the_pools_there_are() -> None:
    choice = PoolChoice([Matched(f"p{number}", models=(f"m{number}",)) for number in range(SHOWN_MAX + 3)])
    with pytest.raises(Refused) as refused:
        choice.of_model("m" * 1000)
    assert refused.value.cause is Cause.NO_POOL
    answer = refusals.answer(refused.value)
    text = json.loads(answer.body)["error"]["message"]
    assert (answer.status, answer.code) == (404, "NotFound")
    assert f"the model '{'m' * KEPT_CHARS_MAX}…'; pools: p0, p1, " in text
    assert text.endswith(f"p{SHOWN_MAX - 1} and 3 more")
    with pytest.raises(Refused, match="names no model"):
        choice.of_model("")


def test_clients_that_invent_models_and_authorities_fill_no_memory() -> None:
    for number in range(KEPT_MAX + 2):
        CHOICE.of_model(f"invented-{number}")
        CHOICE.of_stream(1, f"invented-{number}")
    CHOICE.of_model("x" * (KEPT_CHARS_MAX + 1))
    CHOICE.of_stream(1, "x" * (KEPT_CHARS_MAX + 1))
    assert len(CHOICE._models._kept) <= KEPT_MAX and len(CHOICE._hosts) <= KEPT_MAX
    assert max(map(len, (*CHOICE._models._kept, *CHOICE._hosts))) <= KEPT_CHARS_MAX


@pytest.mark.parametrize(
    ("authority", "host"),
    [("a", "a"), ("a:1", "a"), ("[::1]:80", "[::1]"), ("[::1]", "[::1]"), ("::1", "::1"), ("a:b", "a:b"), ("a:", "a:"), ("", "")],
)
def test_the_host_of_an_authority(authority: str, host: str) -> None:
    assert host_of(authority) == host


@cases(
    ("body", "model"),
    [
        (b'{"model": "m", "prompt": "x"}', "m"),
        (b'{"prompt": {"model": "inner"}, "model": "m\\u0041"}', "mA"),
        (b'{"model": "a", "model": "b"}', "b"),
        (b'{"prompt": "\\ud83d", "model": "m"}', "m"),
        (codecs.BOM_UTF8 + b'{"model": "m"}', "m"),
        (b'{"prompt": "x"}', ""),
        (b'{"model": 5}', ""),
        (b'{"model": null}', ""),
        (b"[1]", ""),
        (b"\xff", ""),
        (b'{"model": "m"', ""),
        (b'{"model": "\xff"}', ""),
        (b"[" * 100_000, ""),
        (b"", ""),
    ],
)
def test_the_model_of_a_body(body: bytes, model: str) -> None:
    assert model_of(body) == model_of(memoryview(body)) == model


# Against slow references.

LETTERS = st.text("ab*", max_size=5)
NAMES = st.text("ab", max_size=6)


def fits(pattern: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern)


@given(LETTERS, NAMES)
def test_a_pattern_fits_what_a_shell_pattern_with_stars_fits(pattern: str, name: str) -> None:
    assert Pattern(f"{pattern}*").fits(name) == fits(f"{pattern}*", name)


@given(LETTERS, LETTERS, NAMES)
def test_a_pattern_that_fits_a_pattern_fits_all_that_it_fits(one: str, other: str, name: str) -> None:
    one, other = f"*{one}", f"{other}*"
    if Pattern(one).fits(other) and fits(other, name):
        assert fits(one, name)


@given(LETTERS, LETTERS, NAMES)
def test_two_patterns_that_fit_one_name_meet(one: str, other: str, name: str) -> None:
    one, other = f"{one}*", f"*{other}"
    if fits(one, name) and fits(other, name):
        assert Pattern(one).meets(Pattern(other)) and Pattern(other).meets(Pattern(one))


@given(st.text("ab", max_size=2), st.text("ab", max_size=2), st.text("ab", max_size=2), st.text("ab", max_size=2))
def test_two_patterns_meet_only_if_there_is_such_a_name(first: str, last: str, other_first: str, other_last: str) -> None:
    name = max(first, other_first, key=len) + max(last, other_last, key=len)
    both = fits(f"{first}*{last}", name) and fits(f"{other_first}*{other_last}", name)
    assert Pattern(f"{first}*{last}").meets(Pattern(f"{other_first}*{other_last}")) == both


MATCHED = st.builds(
    Matched,
    name=st.just("p"),
    port=st.integers(0, 4),
    authorities=st.lists(LETTERS.filter(bool), max_size=3),
    models=st.lists(LETTERS.filter(bool), max_size=3),
)


def naive(matchers: list[tuple[str, int]], names: list[str]) -> int:
    """Tries all matchers: first the exact ones for each form of the name, then the others in their order."""
    for name in names:
        for text, pool in matchers:
            if "*" not in text and text == name:
                return pool
    return next((pool for text, pool in matchers if "*" in text and any(fits(text, name) for name in names)), UNDECIDED)


@given(st.lists(MATCHED, max_size=5), st.integers(0, 4), NAMES, st.sampled_from(["", ":80"]))
def test_the_choice_is_that_of_trying_all_matchers_in_their_order(listed: list[Matched], port: int, name: str, suffix: str) -> None:
    ports, texts = set[int](), set[tuple[str, str]]()
    unique: list[Matched] = []
    for pool in listed:  # no two have the same port or matcher, as in every file that is accepted
        own_port = 0 if pool.port in ports else pool.port
        authorities = [text for text in dict.fromkeys(pool.authorities) if ("a", text) not in texts]
        models = [text for text in dict.fromkeys(pool.models) if ("m", text) not in texts]
        ports.add(own_port)
        texts.update(("a", text) for text in authorities)
        texts.update(("m", text) for text in models)
        unique.append(Matched(f"p{len(unique)}", own_port, authorities, models))
    choice = PoolChoice(unique)
    by_port = next((index for index, pool in enumerate(unique) if pool.port == port and port), UNDECIDED)
    authorities_of = [(text, index) for index, pool in enumerate(unique) for text in pool.authorities]
    models_of = [(text, index) for index, pool in enumerate(unique) for text in pool.models]
    by_authority = naive(authorities_of, [name + suffix, name]) if name else UNDECIDED
    for _ in range(2):  # also from what was kept
        assert choice.of_stream(port, name and name + suffix) == (by_port if by_port != UNDECIDED else by_authority)
        expected = naive(models_of, [name]) if name else UNDECIDED
        try:
            assert choice.of_model(name) == expected
        except Refused:
            assert expected == UNDECIDED


def test_the_name_of_a_pool_that_is_not_there_is_refused_with_those_that_are() -> None:
    assert no_such_pool("a", ["", "a"]) == no_such_pool("", ["a", "b"]) == no_such_pool("", []) == ""
    assert no_such_pool("c", ["a", "", "b"]) == "there is no pool 'c'; pools: a, b"
    assert no_such_pool("c", ["", ""]) == "there is no pool 'c'; the picker has found none yet"
    assert no_such_pool("c", []) == "this picker has only one pool"
