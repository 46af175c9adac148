"""The files of generations: what is stored is what is read."""

from collections.abc import Iterator

import msgspec
import pytest

from workers.process.generations import Bundle, GenerationLost, Generations, TrialResult
from workers.process.names import Names
from workers.process.resources import Words


def bundle(number: int, text: str | None = "text", **plugins: bytes) -> Bundle:
    return Bundle(number, "c.yaml", text, "", plugins, Names(columns=("waiting",)), 12.5)


@pytest.fixture
def generations() -> Iterator[Generations]:
    made = Generations(Words())
    yield made
    made.close()


def test_the_current_generation_is_the_one_that_was_published(generations: Generations) -> None:
    generations.store(0, TrialResult(1, "", bundle(1)))
    generations.store(3, TrialResult(2, "a warning", bundle(2, None, mine=b"code")))
    generations.publish(0, 1)
    assert (generations.number, generations.current()) == (1, bundle(1))
    generations.publish(3, 2)
    assert (generations.number, generations.current()) == (2, bundle(2, None, mine=b"code"))


def test_a_file_that_was_cleared_torn_or_used_again_is_not_taken_for_the_generation(generations: Generations) -> None:
    generations.store(1, TrialResult(7, "refused"))
    assert generations.result(1) == TrialResult(7, "refused")
    generations.clear(1)
    assert generations.result(1) is None
    generations.store(2, TrialResult(1, "", bundle(4)))
    generations.publish(2, 3)
    with pytest.raises(GenerationLost):
        generations.current()


def test_equal_configurations_have_equal_hashes_whatever_their_numbers() -> None:
    assert bundle(1).hash == bundle(2).hash
    assert len({bundle(1).hash, bundle(1, "other").hash, bundle(1, None).hash, bundle(1, "text", a=b"").hash}) == 4


def test_other_keys_make_another_configuration_and_no_keys_the_same_as_ever() -> None:
    one, other = (msgspec.structs.replace(bundle(1), keys={"keys": text}) for text in ("a", "b"))
    assert len({bundle(1).hash, one.hash, other.hash}) == 3
    assert bundle(1).hash == "00fbdd0cf59f"


def test_an_offer_that_is_too_large_is_refused(generations: Generations) -> None:
    with pytest.raises(ValueError, match="at most"):
        generations.store(0, TrialResult(1, "", bundle(1, "x" * (17 << 20))))
