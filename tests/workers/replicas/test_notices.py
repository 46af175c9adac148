from structlog.testing import capture_logs

from workers.replicas.notices import NEWS_MAX, SAID_AGAIN_S, Notices


def test_a_problem_is_logged_once_a_minute_and_another_one_at_once() -> None:
    at, said = [0.0], []
    notices = Notices(lambda: at[0], lambda text, why: said.append((text, why)))
    assert notices.problem("away", "x")
    assert not notices.problem("away", "y")
    assert notices.problem("other", "z")
    at[0] = SAID_AGAIN_S
    assert notices.problem("away", "y")
    assert said == [("away", "x"), ("other", "z"), ("away", "y")]


def test_lines_on_replicas_that_come_and_go_are_bounded() -> None:
    at, said = [0.0], []
    notices = Notices(lambda: at[0], lambda text, why: said.append(text))
    with capture_logs() as lines:
        for _ in range(NEWS_MAX):
            notices.appeared("b", 2)
            notices.gone("b", 1)
        assert len(lines) == NEWS_MAX == notices.left_out
        assert said == ["replicas come and go too often: the log leaves most of them out"]
        at[0] = SAID_AGAIN_S
        notices.gone("b", 1)
    assert lines[-1] == {"event": "replica is gone", "log_level": "warning", "replica": "b", "replicas": 1}
    assert len(lines) == NEWS_MAX + 1
