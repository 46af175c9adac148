"""Recent counters: what has grown in the last minutes, not since the start."""

from workers.supervisor.pages.state.recent import SPAN_S, STEP_S, Recent


def test_only_what_has_grown_in_the_span_counts() -> None:
    recent = Recent()
    at = 0.0
    while at <= 2 * SPAN_S:
        recent.add(at, {"old": 5, "new": int(at)})
        at += 1.0
    assert recent.increases({"old": 5, "new": int(2 * SPAN_S)}) == {"new": int(SPAN_S)}


def test_the_first_minutes_count_from_the_first_sample() -> None:
    recent = Recent()
    assert recent.increases({"a": 3}) == {}
    recent.add(0.0, {"a": 3})
    recent.add(STEP_S / 2, {"a": 4})
    assert recent.increases({"a": 6, "b": 1}) == {"a": 3, "b": 1}
