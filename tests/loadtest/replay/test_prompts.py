"""What the prompts of a recording have in common."""

from loadtest.replay.prompts import OPEN, compared, warm
from tests.loadtest.replay.recordings import TOKENS, asked


def test_a_turn_continues_the_prompt_and_the_answer_of_the_turn_before() -> None:
    requests = [asked(0.0, 1, 2), asked(1.0, 9), asked(2.0, 1, 2, 3, 4), asked(3.0, 1, 2, 3, 4, 5)]
    assert compared(requests).before == [OPEN, OPEN, 0, 2]


def test_questions_about_one_document_are_no_conversation() -> None:
    """The first question leaves the document as its last whole block, so the second one may look like its next turn; no later one does."""
    document = (1, 2, 3)
    requests = [asked(float(at), *document, 100 + at) for at in range(5)]
    assert compared(requests).before == [OPEN] * 5


def test_a_request_during_an_answer_does_not_wait_for_it() -> None:
    assert compared([asked(0.0, 1, 2, lasted=5.0), asked(1.0, 1, 2, 3, 4)]).before == [OPEN, OPEN]


def test_a_prompt_is_known_as_far_as_an_earlier_prompt_goes() -> None:
    requests = [asked(0.0, 1, 2, 3), asked(1.0, 1, 2, 9), asked(2.0, 7), asked(3.0, 1, 2, 9)]
    assert compared(requests).known == [0, 2, 0, 3]


def test_a_server_that_holds_all_known_blocks_tells_how_much_more_it_has() -> None:
    """The third server held less than what is known, so what it would have more is the median of the others."""
    requests = [
        asked(0.0, 1, 2),
        asked(1.0, 1, 2, 3, cached=2 * TOKENS + 48),
        asked(2.0, 1, 2, 4, cached=TOKENS - 1),
        asked(3.0, 1, 2, 5, cached=None),
        asked(4.0, 8, cached=0),
    ]
    assert compared(requests).beyond == [0, 48, 48, 48, 0]


def test_blocks_of_a_server_have_its_own_tokens() -> None:
    requests = [asked(0.0, 1, 2), asked(1.0, 1, 2, prompt=4 * TOKENS, cached=4 * TOKENS - 1)]
    assert compared(requests).beyond[1] == -1


def test_prompts_without_blocks_share_nothing() -> None:
    requests = [asked(float(at), block_tokens=0) for at in range(3)]
    assert compared(requests) == ([OPEN] * 3, [0] * 3, [0] * 3, [()] * 3)


def test_what_a_server_holds_and_nobody_has_sent_there_was_there_before() -> None:
    requests = [
        asked(0.0, 1, 2, 3, held=((0, 2), (1, 2)), target=1),
        asked(1.0, 1, 2, 9, held=((0, 2), (1, 2)), target=1),
        asked(2.0, 1, 2, 9, 4, held=((1, 3),), target=1),
        asked(3.0, 7, 8, held=((0, 1),)),
    ]
    held = warm(requests)
    assert held == [(0, 0, 2), (0, 1, 2), (3, 0, 1)]
    prompts = compared(requests, held)
    assert prompts.known == [2, 2, 3, 1]
    assert [run.blocks for run in prompts.runs[3]] == [1, 1]


def test_blocks_count_as_sent_from_the_decision_on() -> None:
    """The second request arrived first and waited in a queue until the other one was sent."""
    requests = [asked(0.0, 1, 2, held=((0, 2),), waited_s=2.0), asked(1.0, 1, 2)]
    assert warm(requests) == []
