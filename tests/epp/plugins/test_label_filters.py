"""label-selector-filter, by-label and the role filters."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.config.load import ConfigErrors, load
from tests.cases import cases
from tests.epp.plugins.calls import kept, made, only
from tests.fakes import candidates

ROLE = "llm-d.ai/role"


def with_labels(*labels: Mapping[str, str]) -> Any:
    return candidates(count=len(labels), labels=labels)


PODS = with_labels({"a": "1"}, {"a": "2"}, {"a": "1", "b": "x"}, {"b": "y"}, {}, {"a": ""})


def need(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": operator, "values": list(values)}


@cases(
    ("selector", "rows"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"matchLabels": {"a": "1"}}, [0, 2]),
        ({"matchLabels": {"a": "1", "b": "x"}}, [2]),
        ({"matchLabels": {"a": ""}}, [5]),
        ({"matchLabels": {"c": "1"}}, []),
        ({"matchExpressions": [need("a", "In", "1", "2")]}, [0, 1, 2]),
        ({"matchExpressions": [need("a", "In", "")]}, [5]),
        ({"matchExpressions": [need("a", "NotIn", "1")]}, [1, 3, 4, 5]),
        ({"matchExpressions": [need("a", "Exists")]}, [0, 1, 2, 5]),
        ({"matchExpressions": [need("a", "DoesNotExist")]}, [3, 4]),
        ({"matchExpressions": [need("a", "Exists"), need("a", "NotIn", "1")]}, [1, 5]),
        ({"matchLabels": {"a": "1"}, "matchExpressions": [need("b", "DoesNotExist")]}, [0]),
    ],
)
def test_a_selector_keeps_the_endpoints_that_kubernetes_would_select(selector: dict[str, Any], rows: list[int]) -> None:
    assert kept(made("label-selector-filter", **selector), PODS) == rows


@cases(
    ("selector", "message"),
    [
        ({"matchLabels": {"a b": "1"}}, "matchLabels: 'a b' is not a label key: a name is 1 to 63 letters"),
        ({"matchLabels": {"": "1"}}, "matchLabels: '' is not a label key"),
        ({"matchLabels": {"/a": "1"}}, "matchLabels: '/a' is not a label key: the part before the '/'"),
        ({"matchLabels": {"A.io/a": "1"}}, "matchLabels: 'A.io/a' is not a label key: the part before the '/'"),
        ({"matchLabels": {"x/y/z": "1"}}, "matchLabels: 'x/y/z' is not a label key"),
        ({"matchLabels": {"x/": "1"}}, "matchLabels: 'x/' is not a label key: a name"),
        ({"matchLabels": {"a" * 64: "1"}}, "is not a label key"),
        ({"matchLabels": {"d" * 254 + "/a": "1"}}, "is not a label key"),
        ({"matchLabels": {"a": "-1"}}, "matchLabels: '-1' is not a label value: it must be empty, or 1 to 63"),
        ({"matchLabels": {"a": "v" * 64}}, "is not a label value"),
        ({"matchExpressions": [need("a", "Exists"), need("?", "Exists")]}, "matchExpressions[1].key: '?' is not"),
        ({"matchExpressions": [need("a", "In")]}, "matchExpressions[0].values: operator In needs at least one"),
        ({"matchExpressions": [need("a", "NotIn")]}, "matchExpressions[0].values: operator NotIn needs"),
        ({"matchExpressions": [need("a", "Exists", "1")]}, "matchExpressions[0].values: operator Exists takes no"),
        ({"matchExpressions": [need("a", "DoesNotExist", "")]}, "operator DoesNotExist takes no values"),
        ({"matchExpressions": [need("a", "In", "1", "!")]}, "matchExpressions[0].values[1]: '!' is not a label value"),
        ({"matchExpressions": [need("a", "in", "1")]}, "Invalid enum value 'in'"),
        ({"matchExpressions": [{"operator": "Exists"}]}, "missing required field `key`"),
        ({"matchNothing": {}}, "unknown field `matchNothing`"),
    ],
)
def test_a_selector_that_kubernetes_refuses_is_refused(selector: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        made("label-selector-filter", **selector)


@pytest.mark.parametrize("key", ["a", "A-b_c.d", "llm-d.ai/role", "a" * 63, "x.y-z.io/" + "b" * 63])
def test_label_keys_that_kubernetes_accepts_are_accepted(key: str) -> None:
    assert kept(made("label-selector-filter", matchLabels={key: "v"}), with_labels({key: "v"}, {})) == [0]


CONFIG = """\
plugins:
- type: %s
  parameters:
    matchExpressions:
    - {key: a, operator: in, values: [b]}
    - {key: a, operator: In}
- {type: random-picker}
"""


def test_errors_of_a_selector_have_their_line_and_the_nearest_operator() -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(CONFIG % "label-selector-filter", "c.yaml")
    (error,) = caught.value.errors
    assert (error.line, error.hint) == (5, "did you mean 'In'?")
    with pytest.raises(ConfigErrors) as caught:
        load((CONFIG % "label-selector-filter").replace(" in,", " In,"), "c.yaml")
    assert [(error.line, error.rule) for error in caught.value.errors] == [(6, "bad-parameter")]


def test_the_older_type_name_works_with_a_warning() -> None:
    config = load("plugins: [{type: by-label-selector}, {type: random-picker}]", "c.yaml")
    assert [warning.rule for warning in config.warnings] == ["deprecated"]


@pytest.mark.parametrize(
    ("parameters", "rows"),
    [
        ({"validValues": ["1"]}, [0, 2]),
        ({"validValues": ["1", "2", "3"]}, [0, 1, 2]),
        ({"validValues": ["1"], "allowsNoLabel": True}, [0, 2, 3, 4]),
        ({"allowsNoLabel": True}, [3, 4]),
        ({"validValues": [""]}, [3, 4, 5]),
    ],
)
def test_by_label_keeps_listed_values_and_if_allowed_endpoints_without_the_label(parameters: dict[str, Any], rows: list[int]) -> None:
    assert kept(made("by-label", label="a", **parameters), PODS) == rows


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"label": "a"}, "^validValues: is empty, and allowsNoLabel is false"),
        ({"label": "", "validValues": ["1"]}, "length >= 1"),
        ({"validValues": ["1"]}, "required field `label`"),
    ],
)
def test_by_label_refuses_parameters_with_which_no_endpoint_can_pass(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made("by-label", **parameters)


def test_by_label_is_deprecated_and_a_separate_type() -> None:
    text = "plugins: [{type: by-label, parameters: {label: a, validValues: ['1']}}, {type: random-picker}]"
    config = load(text, "c.yaml")
    assert [(warning.rule, warning.message) for warning in config.warnings] == [
        ("deprecated", "plugin type 'by-label' (line 1) is now 'label-selector-filter'")
    ]


ROLES = {
    "encode": ["encode"],
    "prefill": ["prefill"],
    "decode": ["decode"],
    "encode-prefill": ["encode", "prefill"],
    "prefill-decode": ["prefill", "decode"],
    "both": ["prefill", "decode"],
    "encode-prefill-decode": ["encode", "prefill", "decode"],
    "Decode": [],
    "": [],
    None: ["decode"],
}


@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
def test_a_role_filter_keeps_the_roles_that_serve_its_stage(stage: str) -> None:
    c = with_labels(*({} if role is None else {ROLE: role} for role in ROLES))
    expected = [row for row, stages in enumerate(ROLES.values()) if stage in stages]
    assert kept(made(f"{stage}-filter"), c) == expected


def test_labels_are_matched_once_per_endpoint_list_and_the_mask_is_narrowed_to_the_candidates() -> None:
    decode = made("decode-filter")
    matched: list[Mapping[str, str]] = []
    matches = decode.matches
    decode.matches = lambda labels: matched.append(labels) or matches(labels)
    c = with_labels({ROLE: "decode"}, {ROLE: "prefill"}, {})
    assert kept(decode, c) == [0, 2]
    assert kept(decode, only(c, 1, 2)) == [1]
    assert len(matched) == 3
    assert kept(decode, with_labels({ROLE: "prefill"}, {ROLE: "both"})) == [1]


LABELS = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["", "x", "y"]))


@given(st.lists(LABELS, min_size=1, max_size=8), st.sets(st.sampled_from(["", "x", "y"]), min_size=1))
def test_in_and_not_in_together_keep_every_endpoint_once(labels: list[dict[str, str]], values: set[str]) -> None:
    c = with_labels(*labels)
    inside, outside = (
        kept(made("label-selector-filter", matchExpressions=[need("a", operator, *values)]), c) for operator in ("In", "NotIn")
    )
    assert sorted(inside + outside) == list(range(len(labels)))
    assert inside == [row for row, of in enumerate(labels) if of.get("a") in values]
