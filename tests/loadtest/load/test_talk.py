"""The texts of simulated users are the same for the same seed, so that they hit caches."""

import random

from loadtest.load.talk import SYSTEM_PROMPTS, SYSTEM_WORDS, WORDS, document, system_prompt, words


def test_the_same_seed_gives_the_same_words_and_another_seed_different_ones() -> None:
    assert words(random.Random(1), 50) == words(random.Random(1), 50) != words(random.Random(2), 50)


def test_a_text_has_the_requested_number_of_known_words() -> None:
    text = words(random.Random(1), 200).split()
    assert len(text) == 200
    assert {*text} <= {*WORDS}
    assert words(random.Random(1), 0) == ""


def test_a_system_prompt_is_the_same_for_all_users_and_differs_from_the_others_at_once() -> None:
    prompts = [system_prompt(number) for number in range(SYSTEM_PROMPTS)]
    assert prompts == [system_prompt(number) for number in range(SYSTEM_PROMPTS)]
    assert len({prompt[:25] for prompt in prompts}) == SYSTEM_PROMPTS
    assert all(len(prompt.split()) > SYSTEM_WORDS for prompt in prompts)


def test_a_document_has_about_the_requested_size_and_is_always_the_same() -> None:
    for size in (4_000, 60_000):
        text = document(7, size)
        assert 0.8 * size < len(text) < 1.3 * size
        assert text == document(7, size)
        assert text != document(8, size)
