"""Numbers about finished requests are reported to the gateway, computed by CEL expressions."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.decision.decision import Decision, Response, Usage
from epp.plugins import reporters
from epp.plugins.reporters import EXPRESSION_CHARS_MAX, RequestAttribute
from tests.fakes import FakeServices, request

NOWHERE = Decision((), {}, "")


# Reporting


def reporter(expression: str, condition: str = "", services: FakeServices | None = None, **key: str) -> RequestAttribute:
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
    assert reported(plugin, Usage(10, 3)) == {"envoy.lb": {"cost": 17}}  # 17.5 is truncated


def test_the_configured_namespace_and_name_are_used_and_other_metadata_stays() -> None:
    plugin, response = reporter("usage.total_tokens", namespace="billing"), Response(200)
    response.metadata = {"billing": {"other": 1}}
    response.usage = Usage(10, 3)
    plugin.response_complete(request(), NOWHERE, response)
    assert response.metadata == {"billing": {"other": 1, "cost": 13}}


@pytest.mark.parametrize(
    ("usage", "expected"), [(Usage(10, 3), 13), (Usage(10, None), 10), (Usage(None, 3), 3), (Usage(), None), (None, None)]
)
def test_what_the_server_does_not_report_counts_as_0_and_0_is_not_reported(usage: Usage | None, expected: int | None) -> None:
    text = "(has(usage.prompt_tokens) ? usage.prompt_tokens : 0) + (has(usage.completion_tokens) ? usage.completion_tokens : 0)"
    assert reported(reporter(text), usage) == ({} if expected is None else {"envoy.lb": {"cost": expected}})


def test_a_condition_that_is_false_reports_nothing() -> None:
    plugin = reporter("usage.total_tokens", "has(usage.prompt_tokens) && usage.completion_tokens > 5")
    assert reported(plugin, Usage(10, 6)) == {"envoy.lb": {"cost": 16}}
    assert reported(plugin, Usage(10, 5)) == {}


def test_cached_tokens_are_available_if_they_were_reported() -> None:
    services = FakeServices()
    plugin = reporter("usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens", services=services)
    assert reported(plugin, Usage(10, 3, cached=4)) == {"envoy.lb": {"cost": 6}}
    assert reported(plugin, Usage(10, 3)) == {} and services.warned == []
    careful = reporter("has(usage.prompt_tokens_details) ? usage.prompt_tokens_details.cached_tokens : 1")
    assert reported(careful, Usage(10, 3)) == {"envoy.lb": {"cost": 1}}


def test_an_expression_that_fails_for_these_numbers_reports_nothing_and_is_logged() -> None:
    services = FakeServices()
    plugin = reporter("100 / (int(usage.prompt_tokens) - 7)", services=services)
    assert reported(plugin, Usage(7, 0)) == {}
    assert services.warned == ["request attribute has no value key=cost reason=division by zero in CEL expression"]
    assert reported(plugin, Usage(8, 0)) == {"envoy.lb": {"cost": 100}}


def test_an_infinite_or_undefined_value_is_not_reported() -> None:
    assert reported(reporter("usage.prompt_tokens / usage.completion_tokens"), Usage(7, 0)) == {}
    assert reported(reporter("usage.prompt_tokens / usage.completion_tokens"), Usage(0, 0)) == {}


@pytest.mark.parametrize(
    ("expression", "condition", "message"),
    [
        ("usage.prompt_tokens +", "", "attributes[0].expression: Failed to parse expression"),
        ("usage.tokens", "", "attributes[0].expression: `usage` has no field 'tokens'"),
        ("2 * usage.prompt_tokens", "", "attributes[0].expression: No such overload"),
        ("usage.prompt_tokens > 1", "", "attributes[0].expression: must give a number, but gives True for a usual usage"),
        ("usage", "", "attributes[0].expression: must give a number"),
        ("1", "usage.prompt_tokens", "attributes[0].condition: must give true or false, but gives 1000.0"),
        ("1", "!usage.prompt_tokens", "attributes[0].condition: "),
        ("request.size", "", "attributes[0].expression: Undefined variable or function: 'request'"),
    ],
)
def test_an_expression_that_cannot_work_stops_the_start(expression: str, condition: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        reporter(expression, condition)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("attributes", [[], [{"key": {"name": "a"}, "expression": "1"}] * 2, [{"key": {"name": ""}, "expression": "1"}]])
def test_exactly_one_attribute_with_a_name_is_reported(attributes: list[object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"attributes": attributes}, RequestAttribute.Params)


def test_an_expression_that_is_too_long_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        reporter("1" + "+1" * EXPRESSION_CHARS_MAX)


def test_without_the_library_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporters, "cel", None)
    with pytest.raises(ValueError, match=r"pip install 'endpoint-picker\[cel\]'"):
        reporter("1")


@given(st.text(alphabet="usage.prompt_tokens()[]'\"+-*/%<>=!&|?: 019ehain\n", max_size=60))
def test_any_text_compiles_or_is_refused_with_its_field(text: str) -> None:
    try:
        plugin = reporter(text or "1")
    except ValueError as refused:
        assert str(refused).startswith("attributes[0].expression: ")
    else:
        assert set(reported(plugin, Usage(10, 3)).get("envoy.lb", {})) <= {"cost"}
