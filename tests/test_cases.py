"""Cases within one test: all run, and each failure is shown with its values."""

import pytest

from tests.cases import cases


def test_all_cases_run_and_each_failure_has_its_values() -> None:
    ran = []

    @cases(("left", "right"), [(1, 1), (1, 2), (2, 2), (2, 3)])
    def test(left: int, right: int) -> None:
        ran.append((left, right))
        if left == 2:
            assert left == right
        if left < right:
            pytest.fail("unequal")

    with pytest.raises(BaseExceptionGroup, match="2 of 4 cases failed") as raised:
        test()
    assert ran == [(1, 1), (1, 2), (2, 2), (2, 3)]
    assert [failure.__notes__ for failure in raised.value.exceptions] == [["the case: left=1, right=2"], ["the case: left=2, right=3"]]


def test_a_stack_of_cases_is_each_with_each_and_fixtures_are_passed_on(seen: list[str]) -> None:
    @cases("one", "ab")
    @cases("other", [1, 2])
    def test(one: str, other: int, seen: list[str]) -> None:
        seen.append(f"{one}{other}")

    test(seen=seen)
    assert seen == ["a1", "a2", "b1", "b2"]


@pytest.fixture
def seen() -> list[str]:
    return []


@cases("value", [[], [1], [1, 2]])
def test_a_value_may_be_a_list_and_a_fixture_comes_from_pytest(value: list[int], seen: list[str]) -> None:
    assert len(value) < 3
    assert seen == []


def test_a_test_without_cases_or_without_the_parameter_is_refused() -> None:
    with pytest.raises(AssertionError, match="checks nothing"):
        cases("value", [])
    with pytest.raises(AssertionError, match="does not take all"):
        cases("value", [1])(lambda other: None)
