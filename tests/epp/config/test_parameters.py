from typing import Annotated, Any, Literal

import msgspec

from epp.config import yaml_nodes
from epp.config.findings import Findings, Place
from epp.config.parameters import TRIES_MAX, decode
from tests.cases import cases


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    max_value: Annotated[float, msgspec.Meta(ge=0, le=1)]
    name: str = ""

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise ValueError("name must not be bad")


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    path: str
    watch_file: bool = False
    conditions: list[Inner] = []
    labels: dict[str, str] = {}
    by_name: dict[str, Inner] = {}
    inner: Inner | None = None
    mode: Literal["fast", "exact"] = "fast"
    count: Annotated[int, msgspec.Meta(ge=1)] = 1


def read(text: str) -> tuple[Any, list[str]]:
    findings = Findings("f")
    params = decode(Params, yaml_nodes.read(text, findings), "plugin 'x'", Place(9, 9), findings)
    return params, [str(error).replace(" of plugin 'x'", "") for error in findings.errors]


def test_valid_parameters_are_their_struct() -> None:
    params, errors = read("path: a\nwatchFile: true\nconditions: [{maxValue: 1}]\nbyName: {q: {maxValue: 0}}\ncount: 3")
    assert errors == []
    assert params == Params("a", watch_file=True, conditions=[Inner(1.0)], by_name={"q": Inner(0.0)}, count=3)


def test_a_null_is_the_default_unless_the_field_is_required() -> None:
    assert read("path: a\nconditions: null\ncount: ~\ninner: null") == (Params("a"), [])
    assert read("path: null") == (None, ["f:1:1: error[missing-field]: parameters: 'path' is required"])


@cases(
    ("text", "error"),
    [
        ("path: 5", "f:1:1: error[bad-parameter]: parameters.path: expected text, got the number 5 (put it in quotes)"),
        ("path: []", "f:1:1: error[bad-parameter]: parameters.path: expected text, got a list"),
        ("watchFile: 'no'", "f:1:1: error[bad-parameter]: parameters.watchFile: expected true or false, got the text 'no'"),
        ("count: 1.5", "f:1:1: error[bad-parameter]: parameters.count: expected an integer, got the number 1.5"),
        ("count: true", "f:1:1: error[bad-parameter]: parameters.count: expected an integer, got the boolean true"),
        ("mode: fas", "f:1:1: error[bad-parameter]: parameters.mode: invalid enum value 'fas' (did you mean 'fast'?)"),
        ("inner: 5", "f:1:1: error[bad-parameter]: parameters.inner: expected a mapping, got the number 5"),
        ("inner: {maxvalue: 1}", "f:1:9: error[unknown-field]: parameters.inner: unknown field 'maxvalue' (did you mean 'maxValue'?)"),
        ("conditions: [{}]", "f:1:14: error[missing-field]: parameters.conditions[]: 'maxValue' is required"),
        ("conditions: [{maxValue: 0, name: bad}]", "f:1:14: error[bad-parameter]: parameters.conditions[]: name must not be bad"),
        ("labels: {b: x, a: 1}", "f:1:16: error[bad-parameter]: parameters.labels.a: expected text, got the number 1 (put it in quotes)"),
        ("labels: {b: [], a: 1}", "f:1:10: error[bad-parameter]: parameters.labels.b: expected text, got a list"),
        ("byName: {q: {maxValue: 0}, r: {name: []}}", "f:1:32: error[bad-parameter]: parameters.byName.r.name: expected text, got a list"),
        ("pathh: x", "f:1:1: error[unknown-field]: parameters: unknown field 'pathh' (did you mean 'path'?)"),
        ("", "f:9:9: error[missing-field]: parameters: 'path' is required"),
        ("[1]", "f:1:1: error[wrong-type]: parameters: expected a mapping, got a list"),
    ],
)  # fmt: skip
def test_an_error_has_the_place_of_its_value(text: str, error: str) -> None:
    params, errors = read(text)
    assert params is None
    assert error in errors


def test_all_errors_come_at_once_and_a_wrong_field_does_not_count_as_missing() -> None:
    _, errors = read("path: 1\ncount: 0\nconditions:\n- {maxValue: 2}\n- {maxValue: 1, nme: x}\n- {maxValue: 3}\nmode: 5\n")
    assert sorted(error.split(": ")[0] for error in errors) == ["f:1:1", "f:2:1", "f:4:4", "f:5:17", "f:6:4", "f:7:1"]


def test_the_number_of_tries_is_bounded() -> None:
    params, errors = read("path: a\nconditions: [" + "{maxValue: 2}, " * 200 + "]")
    assert params is None
    assert 0 < len(errors) <= TRIES_MAX


def test_a_type_without_parameters_gets_a_hint_that_says_so() -> None:
    class None_(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        pass

    findings = Findings("f")
    assert decode(None_, yaml_nodes.read("a: 1", findings), "plugin 'x'", Place(1, 1), findings) is None
    assert findings.errors[0].hint == "it takes no parameters"
