"""Keyed hashes say which names are equal, and not what they are."""

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from epp.recording.keys import KEPT_MAX, Keyed, id_hash


@given(text=st.text(), secret=st.integers(0, 2**64 - 1))
def test_equal_names_have_equal_hashes_under_one_secret_only(text: str, secret: int) -> None:
    here, there, elsewhere = Keyed(secret), Keyed(secret), Keyed(secret ^ 1)
    assert here(text) == there(text) < 2**64
    assert bool(here(text)) == bool(text)
    if text:
        assert here(text) != elsewhere(text)


def test_the_hashes_of_many_names_do_not_pile_up() -> None:
    keyed = Keyed(1)
    first = keyed("0")
    for number in range(2 * KEPT_MAX):
        keyed(str(number))
    assert len(keyed._kept) <= KEPT_MAX and keyed("0") == first


def test_two_pickers_with_one_secret_have_one_identity() -> None:
    assert Keyed(5).identity == Keyed(5).identity != Keyed(6).identity


@given(id=st.uuids())
def test_a_uuid_is_hashed(id: UUID) -> None:
    assert id_hash(str(id)) == id_hash(str(id)) != 0


@given(text=st.text(max_size=40))
def test_any_other_id_is_left_out(text: str) -> None:
    try:
        UUID(text)
    except ValueError:
        assert id_hash(text) == 0


def test_a_name_with_hyphens_in_the_places_of_a_uuid_is_no_uuid() -> None:
    assert id_hash("tenants0-acme-corp-says-hello-worlds") == 0
