from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tests.epp.plugins.calls import kept, made, only, permuted, score
from tests.fakes import candidates, request

LABEL = "llm-d.ai/context-length-range"


def labelled(*labels: str | None, key: str = LABEL) -> Any:
    return candidates(count=len(labels), labels=[{} if label is None else {key: label} for label in labels])


def tokens(count: int) -> Any:
    return request(b"x" * (4 * count))


@cases(
    ("label", "count", "expected"),
    [
        # w = 10000: 0.3 + 0.7 * (0.7 / 2 + 0.3 * (10000 - n) / 10000)
        ("0-10000", 0, 0.755),  # 0.3 + 0.7 * (0.35 + 0.3)
        ("0-10000", 5000, 0.65),  # 0.3 + 0.7 * (0.35 + 0.15)
        ("0-10000", 10000, 0.545),  # 0.3 + 0.7 * 0.35
        # w = 2500: 0.3 + 0.7 * (0.7 / 1.25 + 0.3 * (3000 - 1000) / 2500)
        ("500-3000", 1000, 0.86),  # 0.3 + 0.7 * (0.56 + 0.24)
        ("77-77", 77, 1.0),  # w = 0
        # out of range: 0.3 / (1 + distance / 1000)
        ("0-1000", 2000, 0.15),  # 0.3 / 2
        ("4000-8000", 1000, 0.075),  # 0.3 / 4
        ("77-77", 78, 0.3 / 1.001),
        (" 500 - 3000 ", 1000, 0.86),
        (None, 1000, 0.5),
        ("", 1000, 0.0),
        ("1000", 1000, 0.0),
        ("0-1-2", 1, 0.0),
        ("a-b", 1, 0.0),
        ("-5-10", 1, 0.0),
        ("10-5", 7, 0.0),
        ("0-1e9", 7, 0.0),
        ("1_0-2_0", 15, 0.0),
        ("٠-٩", 5, 0.0),
        ("0-" + "9" * 16, 5, 0.0),
    ],
)
def test_a_range_scores_by_width_and_room_or_by_distance(label: str | None, count: int, expected: float) -> None:
    assert score(made("context-length-aware"), labelled(label), tokens(count)) == pytest.approx([expected])


def test_the_filter_keeps_endpoints_in_range_and_endpoints_without_the_label() -> None:
    c = labelled("0-100", "100-200", "101-200", None, "nonsense", "0-99", "100-100")
    on = made("context-length-aware", enableFiltering=True)
    assert kept(on, c, tokens(100)) == [0, 1, 3, 6]
    assert kept(on, only(c, 0, 2, 3), tokens(100)) == [0, 2]
    assert kept(on, c, tokens(10**6)) == [3]


def test_it_filters_only_if_it_is_enabled() -> None:
    assert kept(made("context-length-aware"), labelled("0-1", "nonsense"), tokens(100)) == [0, 1]


def test_the_label_is_configurable_and_a_new_endpoint_list_is_read() -> None:
    scorer = made("context-length-aware", label="len")
    assert score(scorer, labelled("3-3", None, key="len"), tokens(3)) == [1.0, 0.5]
    assert score(scorer, labelled(None, "3-3", key="len"), tokens(3)) == [0.5, 1.0]
    with pytest.raises(ValueError, match="length >= 1"):
        made("context-length-aware", label="")


RANGES = st.one_of(
    st.none(),
    st.sampled_from(["", "x", "9-1"]),
    st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)).map(lambda ends: f"{min(ends)}-{max(ends)}"),
)


@given(st.lists(RANGES, min_size=1, max_size=10), st.integers(0, 50_000), st.randoms())
def test_endpoints_in_range_beat_those_out_of_range_and_scores_move_with_their_endpoints(
    labels: list[str | None], count: int, rng: Any
) -> None:
    scorer = made("context-length-aware", enableFiltering=True)
    c, r = labelled(*labels), tokens(count)
    scores, inside = score(scorer, c, r), kept(scorer, c, r)
    assert all(0 <= s <= 1 for s in scores)
    for row, label in enumerate(labels):
        if label is not None:
            assert (scores[row] > 0.3) == (row in inside)
    order = list(range(len(labels)))
    rng.shuffle(order)
    assert score(scorer, labelled(*permuted(labels, order)), r) == permuted(scores, order)
