"""The pace of a watch: within a share of the time, whatever one event takes, and named when it waits long."""

from tests.reports import Reports
from workers.supervisor.kube.reflect import AGAIN_S, BURST_S, QUIET_S, SHARE, SLOWED_S, WatchPace


class Watch:
    """A watch whose events take `work_s` seconds of CPU each, in virtual time."""

    def __init__(self, work_s: float) -> None:
        self.work_s = work_s
        self.now = self.cpu = self.worked = 0.0
        self.reports = Reports()
        self._pace = WatchPace(self.reports, cpu=lambda: self.cpu, clock=lambda: self.now)

    def event(self) -> float:
        """Uses one event, and waits as long as the pace asks. Returns the wait in seconds."""
        self._pace.begin()
        self.cpu += self.work_s
        self.now += self.work_s
        self.worked += self.work_s
        wait_s = self._pace.wait_s(self.now)
        self.now += wait_s
        return wait_s


def test_events_that_take_little_time_never_wait() -> None:
    watch = Watch(0.0001)
    for _ in range(10_000):
        assert watch.event() == 0.0
        watch.now += 0.001
    assert watch.reports == []


def test_a_burst_does_not_wait() -> None:
    watch = Watch(BURST_S / 100)
    assert [watch.event() for _ in range(90)] == [0.0] * 90


def test_a_flood_takes_its_share_and_is_reported_once_a_minute() -> None:
    watch = Watch(0.001)
    while watch.now < 3 * AGAIN_S:
        watch.event()
    assert watch.worked <= SHARE * watch.now + BURST_S + watch.work_s
    assert watch.worked >= 0.5 * SHARE * watch.now
    assert 3 <= len(watch.reports) <= 4


def test_a_short_flood_is_not_reported() -> None:
    watch = Watch(0.001)
    waited = 0.0
    while waited < SLOWED_S / 2:
        waited += watch.event()
    assert watch.reports == []


def test_short_floods_with_quiet_minutes_between_them_are_never_reported() -> None:
    watch = Watch(0.001)
    for _ in range(20):
        waited = 0.0
        while waited < SLOWED_S / 4:
            waited += watch.event()
        watch.now += QUIET_S + 1.0
    assert watch.reports == []


def test_short_floods_that_follow_each_other_are_reported() -> None:
    watch = Watch(0.001)
    for _ in range(8):
        waited = 0.0
        while waited < SLOWED_S / 4:
            waited += watch.event()
        watch.now += QUIET_S / 2
    assert len(watch.reports) >= 1
