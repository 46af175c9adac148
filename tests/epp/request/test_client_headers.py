"""Client headers are typed and bounded, and count as absent if they are out of bounds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.errors import Refused
from epp.request import client_headers as ch
from tests.cases import cases


@pytest.mark.parametrize(
    ("value", "read"), [("tenant", "tenant"), ("", ""), ("x" * 64, "x" * 64), ("x" * 65, ""), ("a\nb", ""), ("\x7f", ""), ("a b", "a b")]
)
def test_a_fairness_id_is_short_and_printable(value: str, read: str) -> None:
    assert ch.fairness_id({ch.FAIRNESS_ID[0]: value}) == read


@pytest.mark.parametrize(
    ("value", "read"),
    [("gold", "gold"), ("a.b-c", "a.b-c"), ("Gold", ""), ("-a", ""), ("a" * 253, "a" * 253), ("a" * 254, ""), ("a b", "")],
)
def test_an_objective_has_the_form_of_a_kubernetes_object_name(value: str, read: str) -> None:
    assert ch.objective({ch.OBJECTIVE[0]: value}) == read


@cases(
    ("value", "read"),
    [
        ("1", 0.001), ("250", 0.25), ("0", None), ("-5", None), ("", None), ("1.5", None), ("1e3", None), ("٣", None),
        ("9" * 12, ch.TTL_S_MAX), ("9" * 5000, ch.TTL_S_MAX), ("00", None), (" 5", None), ("2s", None),
    ],
)  # fmt: skip
def test_a_time_to_live_in_milliseconds_is_a_capped_whole_number(value: str, read: float | None) -> None:
    assert ch.ttl_s({ch.TTL_MS: value}) == read


@cases(
    ("value", "read"),
    [
        ("2s", 2.0), ("1500ms", 1.5), ("1m30s", 90.0), ("1.5h", ch.TTL_S_MAX), ("+2s", 2.0), (".5s", 0.5), ("90m", ch.TTL_S_MAX),
        ("500us", 0.0005), ("500\u00c2\u00b5s", 0.0005), ("0", None), ("0s", None), ("-2s", None), ("", None), ("2", None),
        ("2 s", None), ("s", None), ("two", None), ("nan", None), ("inf", None), ("9" * 400 + "s", None), ("1h" * 400, None),
    ],
)  # fmt: skip
def test_a_time_to_live_is_a_capped_go_duration(value: str, read: float | None) -> None:
    assert ch.ttl_s({ch.TTL: value}) == (read if read is None else pytest.approx(read))


@pytest.mark.parametrize(
    ("duration", "milliseconds", "read"),
    [("2s", "3000", 2.0), ("2s", "1000", 1.0), ("bad", "1000", 1.0), ("2s", "bad", 2.0), ("bad", "bad", None)],
)
def test_of_two_times_to_live_the_shorter_valid_one_counts(duration: str, milliseconds: str, read: float | None) -> None:
    assert ch.ttl_s({ch.TTL: duration, ch.TTL_MS: milliseconds}) == read


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("200", 200.0), ("0.5", 0.5), ("-1", 0.0), ("nan", 0.0), ("inf", 0.0), ("1e300", ch.SLO_MS_MAX), ("x", 0.0),
        ("", 0.0), ("1" * 40, 0.0),
    ],
)  # fmt: skip
def test_a_latency_objective_is_finite_and_not_negative(value: str, read: float) -> None:
    assert ch.slo_ms({ch.TTFT_SLO_MS[0]: value}, ch.TTFT_SLO_MS) == read


@given(st.text(max_size=400))
def test_no_value_raises_except_an_invalid_model_name(value: str) -> None:
    headers = {name: value for names in ch.GROUPS.values() for name in names}
    assert len(ch.fairness_id(headers)) <= ch.FAIRNESS_CHARS_MAX
    assert len(ch.objective(headers)) <= ch.OBJECTIVE_CHARS_MAX
    assert 0.0 < (ch.ttl_s(headers) or 1.0) <= ch.TTL_S_MAX
    assert math.isfinite(ch.slo_ms(headers, ch.TPOT_SLO_MS))
    try:
        assert len(ch.model_rewrite(headers) or "") <= ch.MODEL_CHARS_MAX
    except Refused as refused:
        assert "x-llm-d-model-name-rewrite" in refused.detail


@pytest.mark.parametrize("names", [ch.FAIRNESS_ID, ch.OBJECTIVE, ch.MODEL_REWRITE, ch.TTFT_SLO_MS])
def test_the_current_name_takes_precedence_over_the_older_one_even_if_empty(names: tuple[str, str]) -> None:
    assert ch.first_value({names[0]: "", names[1]: "old"}, names) == ""
    assert ch.first_value({names[1]: "old"}, names) == "old"
    assert ch.first_value({}, names) is None


def test_a_model_name_is_read_as_utf_8() -> None:
    assert ch.model_rewrite({ch.MODEL_REWRITE[0]: "é".encode().decode("latin-1")}) == "é"
    assert ch.model_rewrite({ch.MODEL_REWRITE[0]: "\xe9"}) == "é"


def test_untrusted_headers_are_hidden_under_all_their_names() -> None:
    assert ch.untrusted(tuple(ch.GROUPS)) == frozenset()
    assert ch.untrusted(("objective", "ttl", "slo", "model", "if-available")) == frozenset(ch.FAIRNESS_ID)
    assert ch.untrusted(()) | {*ch.DEBUG} == frozenset(name for names in ch.GROUPS.values() for name in names)


def test_by_default_no_header_is_hidden_and_debug_is_not_trusted() -> None:
    assert ch.untrusted(ch.TRUSTED_BY_DEFAULT) == frozenset(), "hiding a header costs every request"
    assert "debug" in ch.GROUPS and "debug" not in ch.TRUSTED_BY_DEFAULT
