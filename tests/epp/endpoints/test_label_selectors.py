"""Label selectors have the same meaning as for an API server."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.endpoints.label_selectors import of_labels, parse
from tests.cases import cases


@cases(
    ("text", "matches", "does_not"),
    [
        ("a=b", [{"a": "b", "c": "d"}], [{}, {"a": "c"}]),
        ("a==b", [{"a": "b"}], [{}]),
        (" a = b , c ", [{"a": "b", "c": ""}], [{"a": "b"}, {"c": ""}]),
        ("a!=b", [{}, {"a": "c"}], [{"a": "b"}]),
        ("a in (b, c)", [{"a": "b"}, {"a": "c"}], [{}, {"a": "d"}]),
        ("a in (b),d", [{"a": "b", "d": "x"}], [{"a": "b"}]),
        ("a notin (b,c)", [{}, {"a": "d"}], [{"a": "b"}]),
        ("!a", [{}], [{"a": ""}]),
        ("! a,b", [{"b": "x"}], [{"a": "x", "b": "x"}]),
        ("a=", [{"a": ""}], [{}, {"a": "x"}]),
        ("a in (,b)", [{"a": ""}, {"a": "b"}], [{}]),
        ("a>5", [{"a": "6"}, {"a": "10"}], [{}, {"a": "5"}, {"a": "x"}, {"a": "-7"}]),
        ("a < 5", [{"a": "4"}], [{"a": "5"}, {"a": ""}]),
        ("a == 1 , b!=2", [{"a": "1"}], [{"a": "1", "b": "2"}]),
        ("example.com/app.x=V-1_2", [{"example.com/app.x": "V-1_2"}], [{"app.x": "V-1_2"}]),
        ("in in (in)", [{"in": "in"}], [{}]),
    ],
)
def test_a_selector_matches_the_right_labels(text: str, matches: list[dict[str, str]], does_not: list[dict[str, str]]) -> None:
    selector = parse(text)
    assert all(selector.matches(labels) for labels in matches)
    assert not any(selector.matches(labels) for labels in does_not)


@cases(
    ("text", "why"),
    [
        ("", "'' does not start with a term"),
        (",", "',' does not start with a term"),
        ("a=b,", "'' does not start with a term"),
        ("=1", "'=1' does not start with a term"),
        ("a=b=c", "'a=b=c' does not start with a term"),
        ("a in", "'a in' does not start with a term"),
        ("a in b", "'a in b' does not start with a term"),
        ("ain (b)", "'ain (b)' does not start with a term"),
        ("a in (b", "'a in (b' does not start with a term"),
        ("a (b)", "'a (b)' does not start with a term"),
        ("a b", "'a b' does not start with a term"),
        ("a>b", "only integers can be compared"),
        ("a>", "only integers can be compared"),
        ("!", "'!' does not start with a term"),
        (",a", "',a' does not start with a term"),
        ("-a=b", "'-a' is not a label key"),
        ("a=-", "'-' is not a label value"),
        ("c,a=b c", "'a=b c' does not start with a term"),
        ("a/b/c", "'a/b/c' is not a label key"),
        ("UP/b", "'UP/b' is not a label key"),
        ("a=b/c", "'b/c' is not a label value"),
        ("a=" + "x" * 64, "is not a label value"),
        ("x" * 64, "is not a label key"),
        ("a=b;c", "'b;c' is not a label value"),
        (",".join(f"k{n}" for n in range(65)), "more than 64 terms"),
    ],
)
def test_an_invalid_selector_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        parse(text)


LABELS = st.dictionaries(st.from_regex(r"[a-z]([a-z0-9.]{0,3}[a-z0-9])?", fullmatch=True), st.sampled_from(("", "x", "Y.1")), max_size=4)


@given(LABELS, LABELS)
def test_match_labels_become_a_selector_of_equalities(wanted: dict[str, str], labels: dict[str, str]) -> None:
    selector = of_labels(wanted)
    assert selector.matches(labels) == (wanted.items() <= labels.items())
    assert not wanted or parse(selector.text) == selector


@given(st.text("ab=!,() in<>notin/-.", max_size=20))
def test_any_text_is_either_a_selector_or_refused_with_a_reason(text: str) -> None:
    try:
        parse(text).matches({"a": "b"})
    except ValueError as refused:
        assert str(refused)
