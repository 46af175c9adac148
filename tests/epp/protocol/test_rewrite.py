"""Only the name of the model is replaced, compared with the json module; and restored whatever the chunk borders of an answer."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from epp.errors import Cause, Refused
from epp.protocol import rewrite
from epp.protocol.rewrite import MEMBERS_MAX, Member, ModelRestorer, with_model
from tests.cases import cases
from tests.examples import examples

names = st.text(min_size=1, max_size=12)
keys = st.sampled_from(["model", "prompt", "Model", "mode", "modell", "a", "é", '"model"', "\\model"]) | st.text(max_size=6)
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8)
blanks = st.text(" \t\r\n", max_size=3)


@st.composite
def written(draw: Any) -> tuple[bytes, int]:
    """A JSON object in any spelling, and the number of its top-level members `model`."""
    members = draw(st.lists(st.tuples(keys, values), max_size=5))
    ascii_only = draw(st.booleans())
    parts = []
    for key, value in members:
        spelled = json.dumps(key, ensure_ascii=ascii_only)
        if key == "model" and draw(st.booleans()):
            spelled = draw(st.sampled_from(['"m\\u006fdel"', '"mode\\u006C"', '"\\u006d\\u006f\\u0064\\u0065\\u006c"']))
        text = json.dumps(value, ensure_ascii=ascii_only, indent=draw(st.none() | st.just(1)))
        parts.append(draw(blanks) + spelled + draw(blanks) + ":" + draw(blanks) + text + draw(blanks))
    text = draw(blanks) + "{" + (",".join(parts) or draw(blanks)) + "}" + draw(blanks)
    return text.encode("utf-8", "surrogatepass"), sum(key == "model" for key, _ in members)


def pairs(body: bytes) -> list[tuple[str, Any]]:
    members: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=list)
    return members


@given(written(), names)
@examples(400)
@example((b'{"model":"a","b":{"model":1}}', 1), 'q"\\\n')
def test_json_reads_the_new_name_and_all_else_unchanged(case: tuple[bytes, int], name: str) -> None:
    body, count = case
    try:
        body.decode()
        name.encode()
    except UnicodeError:
        return  # not JSON that a parser would accept
    if count > MEMBERS_MAX:
        with pytest.raises(Refused):
            with_model(body, name)
        return
    rewritten = with_model(memoryview(b"xx" + body)[2:], name)
    expected = [(key, name) if key == "model" else (key, value) for key, value in pairs(body)]
    assert pairs(rewritten) == (expected if count else [("model", name), *expected])


@given(written(), names)
@examples(200)
def test_no_byte_outside_of_the_values_changes(case: tuple[bytes, int], name: str) -> None:
    body, count = case
    try:
        body.decode()
        name.encode()
    except UnicodeError:
        return
    if not 0 < count <= MEMBERS_MAX:
        return
    spans = Member("model").spans(body)
    rewritten, value, at = with_model(body, name), json.dumps(name, ensure_ascii=False).encode(), 0
    assert len(spans) == count
    kept = [body[a:b] for a, b in zip([0, *(end for _, end in spans)], [*(start for start, _ in spans), len(body)], strict=True)]
    for piece in kept:
        at = rewritten.index(piece, at) + len(piece)
    assert rewritten.startswith(kept[0]) and rewritten.endswith(kept[-1])
    assert json.loads(value) == name


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"a","n":12345678901234567890123,"x":1.50,"t":"<&>"}', b'{"model":"B","n":12345678901234567890123,"x":1.50,"t":"<&>"}'),
        (b' { "model" :\n"a" } ', b' { "model" :\n"B" } '),
        (b'{"messages":[{"model":"a"}],"model":"a"}', b'{"messages":[{"model":"a"}],"model":"B"}'),
        (b'{"t":"\\"model\\":\\"a\\"","model":"a"}', b'{"t":"\\"model\\":\\"a\\"","model":"B"}'),
        (b'{"model":"a","model":"b"}', b'{"model":"B","model":"B"}'),
        (b'{"model":null}', b'{"model":"B"}'),
        (b"{}", b'{"model":"B"}'),
        (b'{"prompt":"x"}', b'{"model":"B","prompt":"x"}'),
    ],
)
def test_only_the_value_of_the_top_level_member_changes(body: bytes, expected: bytes) -> None:
    assert with_model(body, "B") == expected


def test_a_name_is_written_as_json() -> None:
    assert with_model(b'{"model":1}', 'a"b\\c/é\n') == '{"model":"a\\"b\\\\c/é\\n"}'.encode()


SALT = Member("cache_salt")


@given(written(), st.booleans(), st.booleans(), names)
@examples(200)
def test_a_salt_replaces_the_clients_or_comes_first_and_all_else_is_unchanged(
    case: tuple[bytes, int], given_twice: bool, escaped: bool, salt: str
) -> None:
    body, _ = case
    try:
        body.decode()
        salt.encode()
    except UnicodeError:
        return
    own = b'"cache_salt" : "mine"' if not escaped else b'"c\\u0061che\\u005fsal\\u0074":7'
    inside = body.strip()[1:-1].strip()
    claimed = b"{" + b",".join(filter(None, (own if given_twice else b"", inside, own))) + b"}"
    for text, count in ((claimed, 1 + given_twice), (b"{" + inside + b"}", 0)):
        read = pairs(SALT.put(memoryview(text), salt))
        expected = [(key, salt) if key == "cache_salt" else (key, value) for key, value in pairs(text)]
        assert read == (expected if count else [("cache_salt", salt), *expected])


@cases("blanks", [0, 1, 254, 255, 256, 257, 1000])
@cases("inside", [b"", b'"a":1'])
def test_a_member_is_added_behind_any_number_of_blanks(blanks: int, inside: bytes) -> None:
    for body in (b" " * blanks + b"{" + inside + b"}", b"{" + b"\n" * blanks + inside + b"}"):
        assert pairs(SALT.put(body, "s")) == [("cache_salt", "s"), *pairs(body)]
        assert SALT.put(body, "s").count(b",") == len(pairs(body))


@pytest.mark.parametrize("member", [b"", b',"cache_salt":"mine"'])
def test_a_text_that_is_cut_within_an_emoji_stays_as_it_is(member: bytes) -> None:
    body = b'{"prompt":"\\ud83d"' + member + b"}"
    assert SALT.put(body, "s").replace(b'"cache_salt":"s"', b"").strip(b"{},") == b'"prompt":"\\ud83d"'


@pytest.mark.parametrize("member", [b"", b',"model":"asked"'])
def test_a_byte_order_mark_stays_as_it_is(member: bytes) -> None:
    changed = with_model(b'\xef\xbb\xbf{"a":1' + member + b"}", "target")
    assert changed.startswith(b"\xef\xbb\xbf{") and json.loads(changed) == {"model": "target", "a": 1}


@pytest.mark.parametrize("body", [b"", b"[]", b'"model"', b'{"model":', b'\xff{"model":"a"}', b'{"model":"a"} {}'])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refused) as refused:
        with_model(body, "b")
    assert refused.value.cause is Cause.INVALID_BODY


def test_too_many_models_are_refused_with_the_limit() -> None:
    body = b"{" + b",".join([b'"model":"a"'] * (MEMBERS_MAX + 1)) + b"}"
    with pytest.raises(Refused, match="'model' occurs more than 2 times"):
        with_model(body, "b")


EVENT = b'data: {"id":"1","model":"target","choices":[{"delta":{"content":"the \\"model\\":\\"target\\" is"}}]}\n\n'
RESTORED = EVENT.replace(b'"model":"target",', b'"model":"asked",')


@given(st.lists(st.integers(0, 3 * len(EVENT)), max_size=8), st.sampled_from([b":", b": "]))
@examples(300)
def test_an_answer_has_the_requested_name_whatever_the_chunk_borders(cuts: list[int], colon: bytes) -> None:
    whole = (EVENT * 3).replace(b'"model":"target",', b'"model"' + colon + b'"target",')
    restorer = ModelRestorer("target", "asked")
    borders = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    out = b"".join(restorer.feed(whole[a:b]) for a, b in itertools.pairwise(borders)) + restorer.rest()
    assert out == (RESTORED * 3).replace(b'"model":"asked"', b'"model"' + colon + b'"asked"')


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=5))
@examples(300)
def test_bytes_without_the_name_pass_unchanged(data: bytes, cuts: list[int]) -> None:
    restorer = ModelRestorer("target", "asked")
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    assert b"".join(restorer.feed(data[a:b]) for a, b in itertools.pairwise(borders)) + restorer.rest() == data


@pytest.mark.parametrize("name", ["a", "x" * 256, "ü/é", 'q"q'])
def test_both_spellings_of_a_name_are_restored_and_little_is_held_back(name: str) -> None:
    for ascii_only in (True, False):
        restorer = ModelRestorer(name, "asked")
        answer = b'{"model":' + json.dumps(name, ensure_ascii=ascii_only).encode() + b',"x":1}'
        out = restorer.feed(answer)
        assert out == b'{"model":"asked","x":1}' and restorer.rest() == b""
        assert restorer.feed(answer[:-9]) and len(restorer.rest()) < len(answer)


def test_an_ordinary_end_of_an_event_holds_nothing_back() -> None:
    assert ModelRestorer("target", "asked").feed(EVENT) == RESTORED


def test_names_are_cached_unless_they_are_long() -> None:
    before = rewrite._kept.cache_info()
    for _ in range(2):
        assert ModelRestorer("served-by", "y" * rewrite.KEPT_CHARS_MAX).feed(b'"model":"served-by"').startswith(b'"model":"yy')
        ModelRestorer("served-by", "asked-for")
    after = rewrite._kept.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (1, 1)
