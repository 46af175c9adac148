"""The list of the reference picker's features agrees with the code, and `docs/parity.md` agrees with the list."""

import pytest

from epp.config.registry import REFERENCE_TYPES
from tests.parity.listed import in_code, read
from tests.parity.page import PAGE, page

ABOUT, SECTIONS = read()
CODE = in_code()
each_section = pytest.mark.parametrize("name", SECTIONS)


@each_section
def test_what_the_list_calls_same_better_or_different_exists_here(name: str) -> None:
    missing = sorted(SECTIONS[name].here() - CODE[name])
    assert not missing, f"not in the code; move to [{name}.absent] with the reason: {missing}"


@each_section
def test_what_the_list_calls_absent_does_not_exist_here(name: str) -> None:
    present = sorted(SECTIONS[name].why["absent"].keys() & CODE[name])
    assert not present, f"now in the code; move to 'same' of [{name}], run python -m tests.parity: {present}"


@each_section
def test_a_name_is_listed_once_and_every_difference_has_a_reason(name: str) -> None:
    listed = SECTIONS[name].all()
    assert sorted(listed) == sorted(set(listed))
    assert all(why.strip() for reasons in SECTIONS[name].why.values() for why in reasons.values())


def test_every_type_that_messages_attribute_to_the_reference_is_listed() -> None:
    assert set(SECTIONS["types"].all()) >= REFERENCE_TYPES


def test_the_page_is_generated_from_the_list() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.parity"


def test_the_list_says_what_is_compared_and_when() -> None:
    assert ABOUT.keys() == {"reference", "commit", "dated", "newer"}
    assert all(f"{year}" in ABOUT["dated"] + ABOUT["newer"] for year in (2026,))
