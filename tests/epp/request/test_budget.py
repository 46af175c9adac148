"""Budgets: how much may be used in any time, what an idle tenant may use, and what a refusal says."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.errors import Cause
from epp.protocol import refusals
from epp.request.budget import Bucket, Budget, Left, duration
from shm.budgets import rates_of

RATE, SIZE = 100.0, 500.0
STARTS = 1e6  # monotonic seconds of a machine that has run for days
# (seconds since the last use, who uses, how much)
USES = st.lists(st.tuples(st.floats(0, 20), st.integers(0, 3), st.floats(1, 900)), max_size=80)


class Users:
    """Processes that use one bucket. Each knows what the others have used as of the last `tell`."""

    def __init__(self, count: int) -> None:
        self.bucket = Bucket(RATE, SIZE)
        self.used = [0.0] * count
        self.lapsed = [-math.inf] * count
        self.known = [(0.0, -math.inf)] * count

    def tell(self) -> None:
        for user in range(len(self.used)):
            self.known[user] = sum(self.used) - self.used[user], max(self.lapsed)

    def use(self, user: int, amount: float, now: float) -> bool:
        elsewhere, lapsed = self.known[user]
        used = self.used[user] + elsewhere
        self.lapsed[user] = max(self.lapsed[user], lapsed, self.bucket.lapsed(used, now))
        if self.bucket.left(used, self.lapsed[user], now) < self.bucket.needed(amount):
            return False
        self.used[user] += amount
        return True


@given(USES)
def test_no_more_is_used_in_any_time_than_rate_and_size_allow(uses: list[tuple[float, int, float]]) -> None:
    users, now, log = Users(4), STARTS, []
    for pause, user, amount in uses:
        now += pause
        users.tell()
        if users.use(user, amount, now):
            log.append((now, amount))
    for first, (since, _) in enumerate(log):
        total = 0.0
        for until, amount in log[first:]:
            total += amount
            # A request that is larger than the bucket passes when the bucket is full.
            assert total <= RATE * (until - since) + SIZE + max(0.0, amount - SIZE) + 1e-3


@given(USES)
@settings(max_examples=50)
def test_users_that_know_of_each_other_late_use_no_more_in_a_long_time(uses: list[tuple[float, int, float]]) -> None:
    users, now, total = Users(4), STARTS, 0.0
    for number, (pause, user, amount) in enumerate(uses):
        now += pause
        if number % 8 == 0:
            users.tell()
        amount = min(amount, 50.0)
        if users.use(user, amount, now):
            total += amount
    late = 8 * 50.0
    assert total <= RATE * (now - STARTS) + SIZE + late + 1e-3


@given(USES, st.floats(1, 900))
def test_whoever_was_idle_for_long_enough_is_admitted(uses: list[tuple[float, int, float]], amount: float) -> None:
    users, now = Users(4), STARTS
    for pause, user, used in uses:
        now += pause
        users.tell()
        users.use(user, used, now)
    users.tell()
    assert users.use(2, amount, now + (900 + SIZE) / RATE + 0.001)


def test_eight_workers_share_a_rate_within_two_percent() -> None:
    users, now, total = Users(8), STARTS, 0.0
    while now < STARTS + 60:
        now += 0.002  # how often workers read what the others have used
        users.tell()
        for user in range(8):  # all of them want more than is left
            total += 20.0 * users.use(user, 20.0, now)
    assert total == pytest.approx(RATE * 60 + SIZE, rel=0.02)


def test_three_replicas_that_know_each_other_late_share_a_rate_within_five_percent() -> None:
    users, now, total, turn = Users(3), STARTS, 0.0, 0
    while now < STARTS + 60:
        now += 0.005
        turn += 1
        if turn % 20 == 0:  # ten times as late as messages usually come
            users.tell()
        for user in range(3):
            total += 20.0 * users.use(user, 20.0, now)
    assert total == pytest.approx(RATE * 60 + SIZE, rel=0.05)


def test_what_is_given_back_can_be_used_but_fills_the_bucket_at_most() -> None:
    users = Users(1)
    assert users.use(0, 500.0, STARTS)
    users.used[0] -= 300.0
    assert not users.use(0, 301.0, STARTS)
    assert users.use(0, 300.0, STARTS)
    users.used[0] -= 5000.0
    assert users.use(0, 500.0, STARTS)
    assert not users.use(0, 1.0, STARTS)


BUDGET = Budget(Bucket(6000 / 60, 500.0), Bucket(60 / 60, 60.0), 2)


@pytest.mark.parametrize(
    ("left", "tokens", "admitted"),
    [
        (Left(BUDGET, 100.0, 1.0, 1), 100.0, True),
        (Left(BUDGET, 500.0, 1.0, 0), 10_000.0, True),
        (Left(BUDGET, 99.9, 1.0, 0), 100.0, False),
        (Left(BUDGET, 500.0, 0.9, 0), 1.0, False),
        (Left(BUDGET, 500.0, 60.0, 2), 1.0, False),
        (Left(Budget(None, None), 0.0, 0.0, 99), 1.0, True),
    ],
)
def test_a_request_passes_if_all_of_it_is_left(left: Left, tokens: float, admitted: bool) -> None:
    assert left.admits(tokens) is admitted


def test_a_refusal_says_what_is_left_and_when_to_ask_again() -> None:
    refused = Left(BUDGET, -150.0, 30.5, 1).refusal(100.0)
    answer = refusals.answer(refused)
    assert (refused.cause, answer.status) == (Cause.OVER_BUDGET, 429)
    assert b"the budget of this tenant is used up: tokens per minute" in answer.body
    assert answer.headers == {
        "content-type": "application/json",
        "x-llm-d-request-dropped-reason": "rejected-over-budget",
        "retry-after": "3",
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "30",
        "x-ratelimit-reset-requests": "29.5s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "6.5s",
    }


def test_a_refusal_names_each_limit_that_is_reached() -> None:
    refused = Left(BUDGET, 0.0, 0.0, 2).refusal(100.0)
    assert refused.detail == "tokens per minute and requests per minute and concurrent requests"
    assert refused.retry_after_s == 1
    concurrent = Left(Budget(None, None, 2), 0.0, 0.0, 2).refusal(100.0)
    assert (concurrent.detail, concurrent.retry_after_s, concurrent.headers) == ("concurrent requests", 1, {})


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0ms"), (0.0111, "12ms"), (1.0, "1s"), (1.25, "1.25s"), (360.0, "6m0s"), (61.5, "1m1.5s")]
)
def test_durations_are_written_as_clients_of_openai_read_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_plan_has_both_rates() -> None:
    assert rates_of(Budget(Bucket(200_000 / 60, 50_000.0), Bucket(0.1, 6.0), 5, 0.5).plan) == (
        Bucket(200_000 / 60, 1.0).rate,
        Bucket(0.1, 1.0).rate,
    )
    assert rates_of(Budget(None, Bucket(1e9, 1.0)).plan) == (0.0, 1e9)
    assert Budget(None, None, 3).plan == 0
    assert Bucket(200_000 / 60, 1.0).rate == pytest.approx(200_000 / 60, rel=1e-7)
