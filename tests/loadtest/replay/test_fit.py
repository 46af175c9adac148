"""Fits models to traffic that a known server has served."""

import math
import random

import pytest
from msgspec.structs import replace

from loadtest.replay.fit import TooLittle, fitted
from loadtest.replay.reading import Asked, Recording, Sight
from loadtest.replay.servers import UNBOUNDED, Form, Job, Speed, server
from tests.loadtest.replay.recordings import asked, lifetime

SPEED = Speed("steps", 0.004, 40e-6, 0.012, 0.004, 8192, UNBOUNDED, UNBOUNDED, 0, 0.0)
RATE = 12.0  # requests per second: with SPEED, the server computes prompts half of the time


def served(speed: Speed, count: int) -> list[Asked]:
    """Returns requests at random times, as a server of this speed answers them."""
    rng = random.Random(1)
    model = server(speed)
    arrivals, jobs, first, last = [], [], [0.0] * count, [0.0] * count
    now = 0.0

    def note(until: float) -> None:
        for at, job, is_first in model.advance(until):
            (first if is_first else last)[job.number] = at

    for number in range(count):
        now += rng.expovariate(RATE)
        job = Job(number, [], 1.0, rng.randint(200, 2_000), rng.randint(20, 120), 0)
        note(now)
        model.submit(job, now)
        arrivals.append(now)
        jobs.append(job)
    while model.due < math.inf:
        note(model.due)
    return [
        asked(at, lasted=end - at, output=job.output, first_s=begin - at, prompt=job.prompt, prompt_tokens=job.prompt)
        for at, job, begin, end in zip(arrivals, jobs, first, last, strict=True)
    ]


def recording(requests: list[Asked]) -> Recording:
    return Recording(requests, [lifetime(0)], [Sight()], {}, 0)


@pytest.mark.parametrize("form", ["steps", "serial", "slots"])
def test_finds_the_form_and_the_speed_of_a_server(form: Form) -> None:
    truth = replace(SPEED, form=form, growth=SPEED.growth if form == "steps" else 0.0)
    (found,) = fitted(recording(served(truth, 150)), lambda _: None)
    assert found.form == form
    assert found.prefill_s == pytest.approx(truth.prefill_s, rel=0.05)
    assert found.decode_s == pytest.approx(truth.decode_s, rel=0.1)
    assert found.error < 0.05


def test_finds_the_speed_of_a_server_also_from_answers_that_are_not_streamed() -> None:
    truth = replace(SPEED, form="slots", growth=0.0)
    whole = [replace(each, streaming=False, first_s=each.lasted_s) for each in served(truth, 200)]
    (found,) = fitted(recording(whole), lambda _: None)
    assert found.prefill_s == pytest.approx(truth.prefill_s, rel=0.25)
    assert found.decode_s == pytest.approx(truth.decode_s, rel=0.1)
    assert found.error < 0.1


def test_refuses_a_recording_with_hardly_any_answers() -> None:
    with pytest.raises(TooLittle, match="at least 20"):
        fitted(recording(served(SPEED, 10)), lambda _: None)
