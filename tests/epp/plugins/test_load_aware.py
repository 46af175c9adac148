import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.epp.plugins.calls import made, only, permuted, score
from tests.fakes import candidates


@pytest.mark.parametrize(
    ("parameters", "waiting", "expected"),
    [
        # 0.5 * (1 - min(q, 128) / 128): 64 gives half of 0.5
        ({}, [0, 64, 128, 1000], [0.5, 0.25, 0.0, 0.0]),
        # 0.5 * (1 - 1/4), 0.5 * (1 - 4/4)
        ({"threshold": 4}, [0, 1, 4, 5], [0.5, 0.375, 0.0, 0.0]),
        ({"threshold": 0}, [64], [0.25]),
        ({"threshold": -3}, [64], [0.25]),
    ],
)
def test_a_queue_is_compared_to_the_threshold_and_no_queue_scores_half(
    parameters: dict[str, int], waiting: list[float], expected: list[float]
) -> None:
    assert score(made("load-aware-scorer", **parameters), candidates({"waiting_requests": waiting})) == expected


def test_requests_sent_since_the_scrape_count_as_waiting() -> None:
    c = candidates({"waiting_requests": [2, 2]}, inflight=[5, 9], inflight_at_scrape=[5, 3])
    # 2 + 0 and 2 + 6 of 8
    assert score(made("load-aware-scorer", threshold=8), c) == [0.375, 0.0]


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 50)), min_size=1, max_size=12), st.randoms())
def test_scores_are_at_most_half_and_move_with_their_endpoints(rows: list[tuple[int, int]], rng: object) -> None:
    order = list(range(len(rows)))
    rng.shuffle(order)  # type: ignore[attr-defined]

    def scores(of: list[tuple[int, int]]) -> list[float]:
        waiting, inflight = zip(*of, strict=True)
        return score(made("load-aware-scorer"), candidates({"waiting_requests": waiting}, inflight=inflight))

    straight = scores(rows)
    assert all(0 <= s <= 0.5 for s in straight)
    assert scores(permuted(rows, order)) == permuted(straight, order)


def test_filtered_candidates_score_the_same_as_among_all() -> None:
    c = candidates({"waiting_requests": [0, 32, 64]})
    assert score(made("load-aware-scorer"), only(c, 1, 2)) == [0.375, 0.25]
