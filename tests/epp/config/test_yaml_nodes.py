import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.config import yaml_nodes
from epp.config.findings import Findings, Place
from tests.cases import cases
from tests.examples import examples


def read(text: str) -> tuple[Any, list[str]]:
    findings = Findings("f")
    root = yaml_nodes.read(text, findings)
    return root and root.plain(), [str(error) for error in findings.errors]


@cases(
    ("scalar", "value"),
    [
        ("1e8", 10**8), ("1e+06", 10**6), ("5.0", 5), ("1e30", 1e30), ("1.5e0", 1.5),
        ("010", 8), ("0o17", 15), ("0x1F", 31), ("0b11", 3), ("1_000", 1000),
        ("08", 8), ("-3", -3), ("+.5", 0.5), ("1.", 1),
        ("yes", True), ("on", True), ("y", True), ("No", False), ("OFF", False), ("true", True), ("~", None), ("", None), ("NULL", None),
        ("2024-01-02", "2024-01-02"), ("1:30", "1:30"), ("1.2.3", "1.2.3"), ("yES", "yES"), ("'1'", "1"), ('"on"', "on"), ("!!str 1", "1"),
        ("!!int 7", 7), ("!!float 7", 7.0), ("!!null ~", None), ("18446744073709551615", 2**64 - 1), ("18446744073709551616", float(2**64)),
        ("0_", 0), ("_1", "_1"), ("0x_", "0x_"), ("-0x10", -16), ("._", "._"), ("-.__e5", "-.__e5"), ("._5", 0.5), ("|\n  a\n", "a\n"),
    ],
)  # fmt: skip
def test_a_scalar_means_the_same_as_in_the_reference_picker(scalar: str, value: object) -> None:
    found, errors = read(f"a: {scalar}")
    assert errors == []
    assert found == {"a": value}
    assert type(found["a"]) is type(value)


@cases(
    ("text", "error"),
    [
        ("a: .inf", "f:1:4: error[yaml-number]: '.inf' is not a finite number"),
        ("a: 1e999", "f:1:4: error[yaml-number]: '1e999' is not a finite number"),
        ("a: !foo 1", "f:1:4: error[yaml-tag]: the tag '!foo' is not supported"),
        ("a: !!int x", "f:1:4: error[yaml-tag]: 'x' does not fit its tag !!int"),
        ("!!set {a}", "f:1:1: error[yaml-tag]: the tag 'tag:yaml.org,2002:set' is not supported"),
        ("? [a]\n: 1", "f:1:3: error[yaml-key]: a key must be a single word or text"),
        ("a: 1\nb: {c: 1, c: 2}", "f:2:11: error[duplicate-key]: 'c' is given twice; first in line 2"),
        ("a: *x", "f:1:4: error[yaml-syntax]: found undefined alias"),
        ("<<: 5", "f:1:5: error[yaml-merge]: '<<' takes a mapping or a list of mappings"),
        ("a: \x00", "f:1:1: error[yaml-syntax]: unacceptable character"),
        ("a: \ud800", "f:1:1: error[yaml-syntax]: 'utf-8' codec can't encode"),
        ("a: 1\n---\n---\nb: 1", "f:3:1: error[one-document]: a configuration must be a single YAML document"),
        ("---\n---\n''", "f:2:1: error[one-document]: a configuration must be a single YAML document"),
        ("- a\nb: 1", "f:2:1: error[yaml-syntax]: did not find expected '-' indicator"),
    ],
)  # fmt: skip
def test_an_error_has_its_place(text: str, error: str) -> None:
    assert read(text)[1][0].startswith(error)


@pytest.mark.parametrize("end", ["---\n", "---\n# nothing\n", "...\n", "---\n---\n"])
def test_a_last_separator_with_nothing_after_it_starts_no_second_document(end: str) -> None:
    assert read(f"---\na: 1\n{end}") == ({"a": 1}, [])


def test_merge_keys_add_missing_keys_and_the_first_source_wins() -> None:
    text = "base: &a {x: 1, y: 1}\nmore: &b {y: 2, z: 2}\nc: {<<: [*a, *b], x: 0}\nd: {<<: *b}"
    found, errors = read(text)
    assert errors == []
    assert found["c"] == {"x": 0, "y": 1, "z": 2}
    assert found["d"] == {"y": 2, "z": 2}


def test_a_merged_value_keeps_the_place_where_it_is_written() -> None:
    root = yaml_nodes.read("a: &a\n  x: 1\nb:\n  <<: *a\n", Findings("f"))
    assert root is not None
    assert isinstance(root.value, dict)
    assert root.value["b"].keys["x"] == Place(2, 3)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [*a]",
        "[" * 100_000,
        "- " * 5_000,
        "{a: " * 100,
        "a: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(f"b{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)),
        "- x\n" * 320_000,
        "x" * (yaml_nodes.TEXT_MAX + 1),
    ],
    ids=["self", "flow", "block", "mappings", "laughs", "long", "characters"],
)
def test_text_that_would_take_too_long_is_refused_early(text: str) -> None:
    found, errors = read(text)
    assert found is None
    assert len(errors) == 1
    assert "error[too-large]" in errors[0]


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    ["1e8", "0x1", "on", "=", "<<", "y", "1_0", "08", "2024-01-01", "a: b", "- a", " a", "a ", "a\n\nb", "\x85", "\u2028"]
)
VALUES = st.recursive(SCALARS | TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=10)


@given(VALUES)
@examples(200)
def test_dumped_values_are_read_back_unchanged(value: Any) -> None:
    text = yaml_nodes.dump({"root": value})
    assert read(text) == ({"root": value}, [])


@given(VALUES)
@examples(100)
def test_json_is_read_as_json(value: Any) -> None:
    found, errors = read(json.dumps({"root": value}))
    if not any("yaml-syntax" in error for error in errors):  # YAML has no surrogate escapes
        assert (found, errors) == ({"root": value}, [])


@given(st.text(max_size=40))
@examples(300)
def test_no_text_raises(text: str) -> None:
    read(text)
