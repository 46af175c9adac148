"""The predicted number of cached tokens."""

import numpy as np

from epp.candidates import Candidates
from epp.data import Datum
from epp.decision import Decision, ProfileRun
from epp.plugin import DataProducer, NoParams, Scorer
from epp.prefix.match import PrefixMatch, prefix_match
from epp.prefix.prediction import as_reported, compared_match, predicted_tokens
from tests.fakes import candidates


class Produces(DataProducer):
    def __init__(self, name: str) -> None:
        super().__init__(name, NoParams())
        self.produces = (prefix_match(name), Datum(f"{name}/more", int))


class Reads(Scorer):
    def __init__(self, name: str) -> None:
        super().__init__("reads", NoParams())
        self.consumes = (prefix_match(name),)


def match(*blocks: float) -> PrefixMatch:
    return PrefixMatch(np.array(blocks) if blocks else None, np.zeros(9, np.uint64), 64)


def run(picked: int, those: Candidates | None = None) -> ProfileRun:
    those = those or candidates(count=3)
    return ProfileRun(those, those.zeros(), [picked])


def decided(**runs: ProfileRun | None) -> Decision:
    name, primary = next(iter(runs.items()))
    return Decision(primary.targets if primary is not None else (), runs, name)


def test_the_prediction_is_what_the_picked_endpoint_holds_in_whole_blocks() -> None:
    assert [predicted_tokens(match(1, 5, 0), decided(default=run(i))) for i in range(3)] == [64, 320, 0]


def test_the_prediction_is_zero_if_no_endpoint_holds_blocks() -> None:
    assert predicted_tokens(match(), decided(default=run(0))) == 0


def test_the_prediction_uses_the_right_row_after_filters() -> None:
    left = candidates(count=3).keep(np.array([False, True, True]))
    assert predicted_tokens(match(1, 2, 3), decided(default=run(1, left))) == 192


def test_nothing_is_predicted_if_another_server_computes_the_prompt() -> None:
    assert predicted_tokens(match(1, 2, 3), decided(decode=run(1), prefill=run(0))) is None
    assert predicted_tokens(match(1, 2, 3), decided(decode=run(1), prefill=None)) == 128
    assert predicted_tokens(match(1, 2, 3), decided(decode=run(1), encode=run(0))) == 128


def test_nothing_is_predicted_without_a_primary_run() -> None:
    assert predicted_tokens(match(1, 2, 3), Decision(run(0).targets, {}, "")) is None


def test_in_server_tokens_the_prediction_is_the_same_share_of_the_prompt_and_at_most_all_of_it() -> None:
    thousand = PrefixMatch(None, np.zeros(16, np.uint64), 64, 1000)
    assert [as_reported(250, thousand, prompt) for prompt in (400, 1000, 3000)] == [100, 250, 750]
    assert [as_reported(predicted, thousand, 500) for predicted in (0, 1000, 1024)] == [0, 500, 500]
    assert as_reported(512, PrefixMatch(None, np.zeros(16, np.uint64), 64), 500) == 250


def test_the_match_that_scorers_read_is_compared_or_else_the_first() -> None:
    producers = [Produces("a"), Produces("b")]
    assert compared_match(producers, [Reads("b")]) == prefix_match("b")
    assert compared_match(producers, []) == prefix_match("a")
    assert compared_match([], [Reads("b")]) is None
