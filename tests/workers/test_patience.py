"""Requests whose body stops coming are refused, and nobody else is."""

from workers.patience import Patience


class Stream:
    """One that waits for its gateway, or not."""

    def __init__(self, come: int) -> None:
        self.come = come
        self.refused: list[float] = []

    def awaited(self) -> int:
        return self.come

    def give_up_waiting(self, seconds: float) -> None:
        self.refused.append(seconds)


def test_a_stream_that_gets_no_further_between_two_looks_is_refused_once():
    stream, patience = Stream(100), Patience(30.0)
    assert patience.look([stream]) == 0
    assert patience.look([stream]) == 1
    assert stream.refused == [30.0]
    stream.come = -1
    assert patience.look([stream]) == 0


def test_a_stream_that_gets_further_is_left_alone_however_long_it_takes():
    stream, patience = Stream(0), Patience()
    for _ in range(50):
        stream.come += 1
        assert patience.look([stream]) == 0


def test_a_stream_whose_gateway_owes_nothing_is_left_alone():
    stream, patience = Stream(-1), Patience()
    assert [patience.look([stream]) for _ in range(5)] == [0] * 5


def test_streams_that_are_gone_are_forgotten():
    patience = Patience()
    patience.look([Stream(1), Stream(2)])
    patience.look([])
    assert patience._seen == {}
