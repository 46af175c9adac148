"""Requests that wait for their predicted first token."""

from hypothesis import given
from hypothesis import strategies as st

from epp.plugins.producers._held_tokens import LOOK_S, Dues, Held

START = 1000.0
STEPS = st.lists(st.none() | st.floats(1e-6, 0.5), max_size=60)  # a look, or a request by the seconds until it is due


def held(due: float) -> Held:
    one = Held()
    one.due = due
    return one


@given(STEPS)
def test_each_request_is_due_once_at_the_first_look_after_its_time(steps: list[float | None]) -> None:
    dues, now = Dues(), START
    dues.now = START
    waiting: set[float] = set()
    for step in steps:
        if step is not None:
            waiting.add(now + step)
            dues.add(now, held(now + step))
            now += LOOK_S / 7
        else:
            due = [each.due for each in dues.due()]
            now = max(now, dues.now)
            assert set(due) == {at for at in waiting if at <= dues.now}
            waiting -= set(due)
    assert dues.count >= len(waiting)
    while dues.count:
        assert dues.due() or dues.count
    assert not dues.due()
