from typing import Any

import pytest

from tests.epp.plugins.calls import made, only, score
from tests.fakes import candidates, request

ZONES = candidates(count=4, labels=[{"zone": "a"}, {"zone": "b"}, {}, {"zone": "a"}])


def scorer(**changed: str) -> Any:
    return made("header-label-affinity-scorer", **{"headerName": "X-Zone", "labelKey": "zone"} | changed)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-zone": "a"}, [1, 0, 0, 1]),
        ({"x-zone": "b"}, [0, 1, 0, 0]),
        ({"x-zone": "c"}, [0, 0, 0, 0]),
        ({"x-zone": "A"}, [0, 0, 0, 0]),
        ({"x-zone": ""}, [0, 0, 0, 0]),
        ({}, [0, 0, 0, 0]),
    ],
)
def test_a_label_that_equals_the_header_scores_one(headers: dict[str, str], expected: list[float]) -> None:
    assert score(scorer(), ZONES, request(headers=headers)) == expected


def test_filtered_candidates_score_by_their_own_labels() -> None:
    assert score(scorer(), only(ZONES, 1, 2, 3), request(headers={"x-zone": "a"})) == [0, 0, 1]


def test_labels_of_a_new_endpoint_list_are_read() -> None:
    one, r = scorer(), request(headers={"x-zone": "a"})
    assert score(one, ZONES, r) == [1, 0, 0, 1]
    assert score(one, candidates(count=2, labels=[{}, {"zone": "a"}]), r) == [0, 1]


def test_an_empty_label_does_not_match_a_missing_header() -> None:
    c = candidates(count=2, labels=[{"zone": ""}, {}])
    assert score(scorer(), c, request(headers={})) == [0, 0]


@pytest.mark.parametrize("changed", [{"headerName": ""}, {"labelKey": ""}])
def test_both_names_are_required(changed: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="length >= 1"):
        scorer(**changed)
