"""A number about a finished request reaches the gateway; and the expressions that compute it."""

import contextlib
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.decision import Decision, Response, Usage
from epp.plugins.reporters import _cel as cel
from epp.plugins.reporters.request_attribute import RequestAttribute
from tests.fakes import FakeServices, request

NOWHERE = Decision((), {}, "")
TOKENS = {"usage": {"prompt": 8.0, "completion": 3.0, "details": {"cached": 2.0}}}


# Reporting


def reporter(
    expression: str, condition: str = "", services: FakeServices | None = None, **key: str
) -> RequestAttribute:
    attribute = {"key": {"name": "cost", **key}, "expression": expression, "condition": condition}
    made = RequestAttribute("r", msgspec.convert({"attributes": [attribute]}, RequestAttribute.Params))
    made.start(services or FakeServices())
    return made


def reported(plugin: RequestAttribute, usage: Usage | None) -> dict[str, dict[str, object]]:
    response = Response(200)
    response.usage = usage
    plugin.response_complete(request(), NOWHERE, response)
    return response.metadata


def test_the_value_goes_into_dynamic_metadata_as_an_integer() -> None:
    plugin = reporter("usage.prompt_tokens + 2.5 * usage.completion_tokens")
    assert reported(plugin, Usage(10, 3)) == {"envoy.lb": {"cost": 17}}  # 17.5 is cut


def test_namespace_and_name_are_the_configured_ones_and_others_stay() -> None:
    plugin, response = reporter("usage.total_tokens", namespace="billing"), Response(200)
    response.metadata = {"billing": {"other": 1}}
    response.usage = Usage(10, 3)
    plugin.response_complete(request(), NOWHERE, response)
    assert response.metadata == {"billing": {"other": 1, "cost": 13}}


@pytest.mark.parametrize(
    ("usage", "expected"),
    [(Usage(10, 3), 13), (Usage(10, None), 10), (Usage(None, 3), 3), (Usage(), None), (None, None)],
)
def test_what_the_server_does_not_report_counts_as_0_and_0_is_not_reported(
    usage: Usage | None, expected: int | None
) -> None:
    text = "(has(usage.prompt_tokens) ? usage.prompt_tokens : 0) + (has(usage.completion_tokens) ? usage.completion_tokens : 0)"
    assert reported(reporter(text), usage) == ({} if expected is None else {"envoy.lb": {"cost": expected}})


def test_a_condition_that_is_false_reports_nothing() -> None:
    plugin = reporter("usage.total_tokens", "has(usage.prompt_tokens) && usage.completion_tokens > 5")
    assert reported(plugin, Usage(10, 6)) == {"envoy.lb": {"cost": 16}}
    assert reported(plugin, Usage(10, 5)) == {}


def test_cached_tokens_are_there_where_they_were_reported() -> None:
    services = FakeServices()
    plugin = reporter("usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens", services=services)
    assert reported(plugin, Usage(10, 3, cached=4)) == {"envoy.lb": {"cost": 6}}
    assert reported(plugin, Usage(10, 3)) == {} and services.warned == []
    careful = reporter("has(usage.prompt_tokens_details) ? usage.prompt_tokens_details.cached_tokens : 1")
    assert reported(careful, Usage(10, 3)) == {"envoy.lb": {"cost": 1}}


def test_an_expression_that_fails_for_these_numbers_reports_nothing_and_says_so() -> None:
    services = FakeServices()
    plugin = reporter("100 / (int(usage.prompt_tokens) - 7)", services=services)
    assert reported(plugin, Usage(7, 0)) == {}
    assert services.warned == ["request attribute 'cost' has no value: division by zero"]
    assert reported(plugin, Usage(8, 0)) == {"envoy.lb": {"cost": 100}}


def test_a_number_that_is_no_integer_is_not_reported() -> None:
    assert reported(reporter("usage.prompt_tokens / usage.completion_tokens"), Usage(7, 0)) == {}
    assert reported(reporter("usage.prompt_tokens / usage.completion_tokens"), Usage(0, 0)) == {}


@pytest.mark.parametrize(
    ("expression", "condition", "message"),
    [
        ("usage.prompt_tokens +", "", "attributes[0].expression: column 22: expected a value, got the end"),
        ("usage.tokens", "", "attributes[0].expression: no such field: tokens"),
        (
            "usage.prompt_tokens > 1",
            "",
            "attributes[0].expression: must give a number, but gives True for a usual usage",
        ),
        ("usage", "", "attributes[0].expression: must give a number"),
        ("1", "usage.prompt_tokens", "attributes[0].condition: must give true or false, but gives 1000.0"),
        ("1", "!usage.prompt_tokens", "attributes[0].condition: no such overload: ! of double"),
        (
            "request.size",
            "",
            "attributes[0].expression: column 1: known variables: usage; known functions: has, int, double, got 'request'",
        ),
    ],
)
def test_an_expression_that_cannot_work_stops_the_start(expression: str, condition: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        reporter(expression, condition)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "attributes", [[], [{"key": {"name": "a"}, "expression": "1"}] * 2, [{"key": {"name": ""}, "expression": "1"}]]
)
def test_exactly_one_attribute_with_a_name_is_reported(attributes: list[object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"attributes": attributes}, RequestAttribute.Params)


# Expressions


def value(text: str) -> object:
    return cel.compile_expression(text, ("usage",))(TOKENS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("10 - 4 - 3", 3),
        ("100 / 10 / 5", 2),
        ("-7 / 2", -3),
        ("-7 % 3", -1),
        ("7 % -3", 1),
        ("7.0 / 2.0", 3.5),
        ("7 / 2.0", 3.5),
        ("1.0 / 0.0", math.inf),
        ("-1.0 / 0.0", -math.inf),
        ("0x1F + 0u", 31),
        ("2e3", 2000.0),
        ("1.5e-1 + .5", 0.65),
        ("--3", 3),
        ("-usage.prompt", -8.0),
        ("usage.prompt * 2", 16.0),
        ('usage["completion"]', 3.0),
        ("usage.details.cached", 2.0),
        ("int(usage.prompt) % 3", 2),
        ("int(-1.9)", -1),
        ("double(3)", 3.0),
        ("1 < 2 && 2.5 >= 2", True),
        ("1 == 1.0", True),
        ("true == 1", False),
        ("true != false", True),
        ("null == null", True),
        ("'a' + \"b\" == 'ab'", True),
        (r"'\'\n' == \"\"", None),
        ("'a' < 'b' && false < true", True),
        ("!true || !!true", True),
        ("true ? 1 : 2", 1),
        ("false ? 1 : true ? 2 : 3", 2),
        ("1 < 2 ? usage.prompt : usage.nobody", 8.0),
        ("has(usage.prompt)", True),
        ("has(usage.nobody)", False),
        ("has(usage.details.cached) && has(usage.details)", True),
        ("'prompt' in usage", True),
        ("'x' in usage.details", False),
        ("1 + // a comment\n 1", 2),
        ("usage\n  .prompt", 8.0),
    ],
)
def test_expressions_have_cels_values(text: str, expected: object) -> None:
    if expected is None:
        with pytest.raises(cel.SyntaxFault):
            value(text)
        return
    found = value(text)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    "text", ["false && 1 / 0 == 1", "1 / 0 == 1 && false", "!(true || usage.x)", "!(usage.x || true)"]
)
def test_the_side_that_decides_wins_over_the_others_error(text: str) -> None:
    assert value(text) is False


@pytest.mark.parametrize(
    ("text", "fault", "message"),
    [
        ("usage.nobody", cel.NoSuchField, "no such field: nobody"),
        ("usage.details.nobody", cel.NoSuchField, "no such field: nobody"),
        ("has(usage.nobody.cached)", cel.NoSuchField, "no such field: nobody"),
        ("1 / 0", cel.DivisionByZero, "division by zero"),
        ("1 % 0", cel.DivisionByZero, "division by zero"),
        ("true && 1 / 0 == 1", cel.DivisionByZero, "division by zero"),
        ("1 / 0 == 1 || false", cel.DivisionByZero, "division by zero"),
        ("9223372036854775807 + 1", cel.Overflow, "an integer beyond 64 bits"),
        ("-9223372036854775807 - 2", cel.Overflow, "an integer beyond 64 bits"),
        ("int(1e300)", cel.Overflow, "an integer beyond 64 bits"),
        ("int(1.0 / 0.0)", cel.Overflow, "int() of inf"),
        ("1 + true", cel.NoSuchOverload, "no such overload: + of int and bool"),
        ("'a' - 'b'", cel.NoSuchOverload, "no such overload: - of string and string"),
        ("5.0 % 2", cel.NoSuchOverload, "no such overload: % of double and int"),
        ("-true", cel.NoSuchOverload, "no such overload: - of bool"),
        ("!1", cel.NoSuchOverload, "no such overload: ! of int"),
        ("1 && true", cel.NoSuchOverload, "no such overload: && of int"),
        ("1 ? 2 : 3", cel.NoSuchOverload, "no such overload: ?: of int"),
        ("1 < 'a'", cel.NoSuchOverload, "no such overload: < of int and string"),
        ("null < null", cel.NoSuchOverload, "no such overload: < of null and null"),
        ("usage < 1", cel.NoSuchOverload, "no such overload: < of map and int"),
        ("usage.prompt.more", cel.NoSuchOverload, "no such overload: field selection of double"),
        ("int('1')", cel.NoSuchOverload, "no such overload: int() of string"),
        ("double(true)", cel.NoSuchOverload, "no such overload: double() of bool"),
    ],
)
def test_what_has_no_value_says_why(text: str, fault: type[Exception], message: str) -> None:
    with pytest.raises(fault) as error:
        value(text)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column 1: expected a value, got the end"),
        ("1 +", "column 4: expected a value, got the end"),
        ("1 2", "column 3: expected 'the end', got '2'"),
        ("(1", "column 3: expected ')', got the end"),
        ("1 ? 2", "column 6: expected ':', got the end"),
        ("usage.", "column 7: expected 'a name', got the end"),
        ("usage[1", "column 8: expected ']', got the end"),
        ("use.prompt", "column 1: known variables: usage; known functions: has, int, double, got 'use'"),
        ("size(usage)", "column 1: known functions: has, int, double, got 'size'"),
        ("usage.exists(x, x)", "column 7: methods and macros are not supported, got 'exists'"),
        ("[1]", "column 1: lists and maps are not supported, got '['"),
        ("{}", "column 1: lists and maps are not supported, got '{'"),
        ("has(usage)", "column 5: has() takes a field, as in has(usage.prompt_tokens), got 'usage'"),
        ("has(1 + 1)", "column 5: has() takes a field, as in has(usage.prompt_tokens), got '1'"),
        ("1 & 2", "column 3: unexpected '&'"),
        ("'open", 'column 1: unexpected "\'"'),
        (r"'\q'", r"column 1: unknown escape '\q', got ''\q''"),
        ("9223372036854775808", "column 1: integers have 64 bits, got '9223372036854775808'"),
        ("1" * 4097, "an expression has at most 4096 characters, this one 4097"),
        ("1" + "+1" * 201, "an expression has at most 200 operations"),
        ("-" * 201 + "1", "an expression has at most 200 operations"),
        ("(" * 33 + "1" + ")" * 33, "an expression nests at most 32 deep"),
        ("true ? 1 : " * 33 + "1", "an expression nests at most 32 deep"),
    ],
)
def test_what_is_no_expression_says_where_and_why(text: str, message: str) -> None:
    with pytest.raises(cel.SyntaxFault) as error:
        value(text)
    assert str(error.value) == message


def test_the_longest_expressions_that_are_allowed_have_a_value() -> None:
    assert value("1" + "+1" * 200) == 201
    assert value("(" * 31 + "1" + ")" * 31) == 1
    assert value("-" * 200 + "1") == 1
    assert value("usage" + "['details']" * 1 + ".cached") == 2.0


@given(st.text(alphabet="usage.prompt()[]'\"+-*/%<>=!&|?: 019ehain\n", max_size=60))
def test_whatever_the_text_it_has_a_value_or_a_named_fault(text: str) -> None:
    with contextlib.suppress(cel.SyntaxFault, cel.EvaluationFault):
        value(text)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1).filter(bool))
def test_division_cuts_towards_zero_and_the_remainder_completes_it(a: int, b: int) -> None:
    names = {"a": a, "b": b}
    try:
        quotient = cel.compile_expression("a / b", names)(names)
    except cel.Overflow:
        assert (a, b) == (-(2**63), -1)
        return
    assert abs(quotient) == abs(a) // abs(b)
    assert quotient * b + cel.compile_expression("a % b", names)(names) == a
