"""The models of a server in a replay."""

import functools
import math

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from loadtest.replay.runs import Run, runs_of
from loadtest.replay.servers import UNBOUNDED, Cache, Job, Server, Speed, server
from loadtest.sim.engine import Engine, EngineSettings, JobState
from loadtest.sim.engine import Job as EngineJob
from tests.examples import examples
from tests.loadtest.replay.recordings import blocks, chained, ints

SERIAL = Speed("serial", 0.5, 0.01, 0.1, 0.0, 8192, 2, UNBOUNDED, 0, 0.0)
STEPS = Speed("steps", 0.0, 0.001, 0.1, 0.5, 1000, UNBOUNDED, UNBOUNDED, 0, 0.0)


def job(number: int, *blocks: int, output: int = 1) -> Job:
    return Job(number, [single(ints(block)) for block in blocks], 100, 100 * len(blocks), output)


@functools.cache
def single(block: bytes) -> Run:
    return Run(block)


def run(model: Server) -> dict[tuple[int, str], float]:
    """Runs a server until it is idle. Returns (request, "first" or "end") -> time."""
    times = {}
    while model.due < math.inf:
        for at, each, is_first in model.advance(model.due):
            times[each.number, "first" if is_first else "end"] = round(at, 9)
    return times


def test_serial_servers_compute_prompts_one_after_the_other_and_answers_side_by_side() -> None:
    model = server(SERIAL)
    model.submit(job(1, 1, output=11), 0.0)
    model.submit(job(2, 2), 0.0)
    assert run(model) == {(1, "first"): 1.5, (1, "end"): 2.5, (2, "first"): 2.5, (2, "end"): 2.5}


def test_slots_compute_prompts_side_by_side() -> None:
    model = server(replace(SERIAL, form="slots"))
    model.submit(job(1, 1), 0.0)
    model.submit(job(2, 2), 0.0)
    assert run(model)[2, "first"] == 1.5


def test_a_request_waits_for_a_slot() -> None:
    model = server(SERIAL)
    for number in (1, 2, 3):
        model.submit(job(number, number), 0.0)
    assert (model.running, len(model.waiting)) == (2, 1)
    assert run(model)[3, "first"] == 3.5  # it begins when the first one ends, after the prompt of the second one


def test_all_requests_of_a_step_wait_for_its_prompts() -> None:
    model = server(STEPS)
    model.submit(job(1, 1, output=3), 0.0)
    model.advance(0.15)
    model.submit(job(2, 2, 3, output=1), 0.15)  # the step that computes it begins at 0.2
    times = run(model)
    assert times[1, "first"] == 0.2
    assert times[2, "first"] == 0.55 == times[2, "end"]  # 0.1 * 1.5 + 200 tokens
    assert times[1, "end"] == 0.65


def test_a_long_prompt_takes_several_steps() -> None:
    model = server(replace(STEPS, step_tokens=100))
    model.submit(job(1, 1, 2, 3), 0.0)
    assert run(model)[1, "first"] == 0.6


def test_a_block_that_several_running_requests_use_takes_room_once() -> None:
    model = server(STEPS)
    for number in (1, 2):
        model.submit(job(number, 7, 8, output=20 * number), 0.0)
    model.advance(1.0)
    assert (model.running, model.active_tokens) == (2, 200 + 20 + 40)
    model.advance(4.0)
    assert (model.running, model.active_tokens) == (1, 200 + 40)
    model.submit(job(3, 7, 9, output=50), 4.0)  # one block that is held, one that is not
    model.advance(5.0)
    assert (model.running, model.active_tokens) == (2, 200 + 40 + 100 + 50)
    run(model)
    assert (model.running, model.active_tokens) == (0, 0)


def test_a_request_waits_for_room_in_the_cache() -> None:
    model = server(replace(STEPS, cache_tokens=350))
    model.submit(job(1, 1, 2, output=5), 0.0)
    model.submit(job(2, 3, 4, output=5), 0.0)
    times = run(model)
    assert times[2, "first"] > times[1, "end"]


def test_cached_blocks_are_not_computed_again_and_the_last_token_always_is() -> None:
    cache = Cache(UNBOUNDED)
    assert cache.take(job(1, 1, 2), 0) == 0
    assert cache.take(job(2, 1, 2), 0) == 199


def test_a_server_that_holds_just_the_known_blocks_has_more_of_the_next_one() -> None:
    cache = Cache(UNBOUNDED)
    first, second, third = (job(number, 1, number, number + 10) for number in (2, 3, 2))
    second.known = third.known = 1
    second.beyond = third.beyond = 30
    assert [cache.take(each, 0) for each in (first, second, third)] == [0, 130, 299]


def test_a_full_cache_forgets_what_was_unused_longest_and_ends_of_prompts_first() -> None:
    cache = Cache(200)
    cache.take(job(1, 1, 2), 0)
    cache.take(job(2, 3), 0)
    assert cache.take(job(3, 1, 2), 0) == 100


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 300)), max_size=25), st.integers(0, 2_000))
def test_a_cache_of_runs_is_like_a_cache_of_blocks(prompts: list[tuple[list[int], int]], tokens: int) -> None:
    chains = [chained(words) for words, _ in prompts]
    of_runs, of_blocks = Cache(tokens), Cache(tokens)
    for number, (chain, runs) in enumerate(zip(chains, runs_of(chains), strict=True)):
        singles = [single(block) for block in blocks(chain)]
        output = prompts[number][1]
        one, other = (Job(number, each, 100, 100 * len(singles), output) for each in (runs, singles))
        assert of_runs.take(one, output) == of_blocks.take(other, output)


def test_a_server_that_dies_forgets_everything() -> None:
    model = server(STEPS)
    model.submit(job(1, 1, 2), 0.0)
    model.clear()
    assert model.due == math.inf and model.running == 0
    model.submit(job(2, 1, 2), 1.0)
    assert run(model)[2, "first"] == 1.3


@examples(60)
@given(
    st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=25),
    st.sampled_from((1, 3, 1000)),
)
def test_steps_give_the_times_of_the_simulated_engine(jobs: list[tuple[float, int, int]], slots: int) -> None:
    """The engine computes all waiting prompts in one step, as this model with a large budget."""
    speed = Speed("steps", 0.0, 1e-4, 0.02, 0.005, 1 << 30, slots, UNBOUNDED, 0, 0.0)
    model, times = server(speed), {}
    engine = Engine(EngineSettings(max_running=slots, prefill_s_per_token=1e-4, step_tokens=1 << 30, kv_blocks=1 << 30))
    made, expected = [], {}
    at = 0.0

    def note(until: float) -> None:
        for when, each, is_first in model.advance(until):
            times[each.number, is_first] = when
        engine.advance(until)

    for number, (gap, prompt, output) in enumerate(jobs):
        at += gap
        note(at)
        model.submit(Job(number, [], 1.0, prompt, output), at)
        made.append(EngineJob([], prompt, output))
        engine.submit(made[-1], at)
    note(1e9)
    for number, each in enumerate(made):
        assert each.state is JobState.FINISHED
        expected[number, True], expected[number, False] = each.first_token_at, each.ended_at
    assert times.keys() == expected.keys()
    assert all(abs(times[key] - expected[key]) < 1e-6 for key in expected)
