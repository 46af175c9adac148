"""Each change of the configuration is one event, with its reason."""

from msgspec.structs import replace

from epp.decision.tryout import Share
from workers.shared.reload_status import ReloadStatus, TryoutStatus
from workers.supervisor.kube.events import ReloadEvents

FIRST = ReloadStatus(1, "abc", "c.yaml", 1.0, finished=4)


class Told:
    def __init__(self) -> None:
        self.events: list[tuple[str, str, bool]] = []

    def tell(self, reason: str, message: str, *, warning: bool) -> None:
        self.events.append((reason, message, warning))


def told(*states: ReloadStatus | None) -> list[tuple[str, str, bool]]:
    """The events for these states, each looked at twice."""
    seen = [*states]
    found = Told()
    events = ReloadEvents(lambda: seen[0], found)
    while seen:
        events.look()
        events.look()
        seen.pop(0)
    return found.events


def test_the_first_state_is_no_event_and_each_end_of_an_attempt_is_one() -> None:
    busy = replace(FIRST, busy=True)
    done = replace(FIRST, generation=2, hash="def", finished=5)
    assert told(FIRST, busy, done, done) == [("ConfigurationReloaded", "generation 2 (def) is in force", False)]


def test_a_refusal_and_a_roll_back_are_warnings_with_the_reason() -> None:
    refused = replace(FIRST, finished=5, successful=False, text="c.yaml:2:1: error[yaml-syntax]: no")
    back = replace(refused, finished=6, text="error[rolled-back]: generation 2 is taken back: a worker hangs")
    assert told(FIRST, refused, back) == [
        ("ConfigurationRefused", f"generation 1 (abc) is in force: {refused.text}", True),
        ("ConfigurationRolledBack", f"generation 1 (abc) is in force: {back.text}", True),
    ]


def test_a_candidate_is_named() -> None:
    tried = TryoutStatus(2, "def", "d.yaml", Share(50_000), 1.0)
    ((_, message, _),) = told(FIRST, replace(FIRST, finished=5, tryout=tried))
    assert message == "generation 1 (abc) is in force; candidate 2 (def) is tried with 5% of the traffic by request"


def test_before_the_first_state_nothing_is_told() -> None:
    assert told(None, replace(FIRST, finished=0)) == []
