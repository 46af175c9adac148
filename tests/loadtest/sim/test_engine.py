"""The engine model, with a clock that the test sets."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sim.engine import Engine, EngineSettings, Job, JobState, NoLoraSlots, QueueFull, TooLong
from tests.examples import examples

# Powers of two, so that sums of times are exact.
PLAIN = EngineSettings(
    max_running=4, kv_blocks=64, prefill_s_per_token=1 / 1024, decode_s=1 / 16, decode_growth=0.0, max_loras=2, lora_load_s=0.5
)
TOKEN = PLAIN.prefill_s_per_token
STEP = PLAIN.decode_s


def job(tokens: int = 16, max_tokens: int = 4, *, lora: str | None = None, streams: bool = False) -> Job:
    return Job([], tokens, max_tokens, lora=lora, streams=streams)


def chain(length: int, root: int = 0) -> Job:
    return Job([root * 1000 + n for n in range(length)], length * 16 + 1, 1)


def finish(engine: Engine, now: float = 0.0) -> list[Job]:
    """Runs to the end of all work, from news to news."""
    done: list[Job] = []
    while (due := engine.next_due()) is not None:
        assert due >= now
        now = due
        done += [job for job in engine.advance(now) if job.state is JobState.FINISHED]
    return done


def test_a_request_takes_its_prefill_and_one_step_for_each_token() -> None:
    engine, one = Engine(PLAIN), job(tokens=128, max_tokens=4)
    engine.submit(one, 10.0)
    assert finish(engine, 10.0) == [one]
    assert one.first_token_at == 10.0 + STEP + 128 * TOKEN
    assert one.ended_at == one.first_token_at + 3 * STEP
    assert one.generated == 4


def test_a_cached_prefix_shortens_the_prefill_and_is_reported() -> None:
    engine, cold, warm = Engine(PLAIN), chain(8), chain(8)
    engine.submit(cold, 0.0)
    finish(engine)
    engine.submit(warm, 100.0)
    finish(engine, 100.0)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == 128
    assert warm.first_token_at - 100.0 == STEP + 1 * TOKEN
    assert cold.first_token_at == STEP + 129 * TOKEN
    assert (engine.seen.prefix_queries, engine.seen.prefix_hits) == (258, 128)


def test_a_long_prompt_delays_the_tokens_of_all_requests() -> None:
    engine, steady, long = Engine(PLAIN), job(max_tokens=3, streams=True), job(tokens=512)
    engine.submit(steady, 0.0)
    first = engine.next_due()
    assert first is not None
    engine.advance(first / 2)
    engine.submit(long, first / 2)
    engine.advance(first)
    assert engine.next_due() == first + STEP + 512 * TOKEN


def test_time_to_first_token_grows_with_the_load() -> None:
    engine = Engine(PLAIN)
    jobs = [job(tokens=64, max_tokens=2) for _ in range(12)]
    for one in jobs:
        engine.submit(one, 0.0)
    finish(engine)
    waits = [one.first_token_at - one.arrived_at for one in jobs]
    assert waits == sorted(waits)
    assert waits[-1] > 2 * waits[0]


def test_a_step_grows_with_the_batch() -> None:
    engine = Engine(replace(PLAIN, decode_growth=0.5, prefill_s_per_token=0.0))
    engine.submit(job(max_tokens=100, streams=True), 0.0)
    engine.submit(job(max_tokens=100, streams=True), 0.0)
    engine.advance(STEP)
    assert engine.next_due() == STEP + STEP * 1.5


def test_requests_run_in_the_order_of_their_arrival() -> None:
    engine = Engine(replace(PLAIN, max_running=1))
    jobs = [job(max_tokens=1 + n % 3) for n in range(6)]
    for one in jobs:
        engine.submit(one, 0.0)
    assert (engine.running, engine.waiting) == (1, 5)
    assert finish(engine) == jobs


def test_no_request_overtakes_a_head_that_waits_for_blocks() -> None:
    engine = Engine(replace(PLAIN, kv_blocks=8))
    running, big, small = job(64, 16), job(100, 12), job(1, 1)
    for one in (running, big, small):
        engine.submit(one, 0.0)
    assert (engine.running, engine.waiting) == (1, 2)
    assert finish(engine) == [running, small, big]
    assert big.admitted_at == small.admitted_at == running.ended_at


def test_a_step_takes_further_prompts_until_its_token_budget_is_spent() -> None:
    engine = Engine(replace(PLAIN, step_tokens=100))
    for _ in range(3):
        engine.submit(job(tokens=60, max_tokens=8), 0.0)
    assert engine.running == 1  # an idle engine starts with the first request
    due = engine.next_due()
    assert due is not None
    engine.advance(due)
    assert (engine.running, engine.waiting) == (3, 0)


def test_a_request_larger_than_the_pool_is_refused_with_the_limit() -> None:
    engine = Engine(PLAIN)
    with pytest.raises(TooLong, match="maximum context length is 1024 tokens"):
        engine.submit(job(tokens=1020, max_tokens=5), 0.0)
    assert engine.next_due() is None


def test_a_full_queue_refuses() -> None:
    engine = Engine(replace(PLAIN, max_running=1, waiting_max=2))
    for _ in range(3):
        engine.submit(job(), 0.0)
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        engine.submit(job(), 0.0)


def test_an_adapter_is_refused_by_an_engine_without_slots() -> None:
    with pytest.raises(NoLoraSlots, match="max_loras is 0"):
        Engine(replace(PLAIN, max_loras=0)).submit(job(lora="a"), 0.0)


def test_an_adapter_waits_for_a_slot_and_other_requests_pass_it() -> None:
    engine = Engine(PLAIN)
    first, second = job(lora="a", max_tokens=2), job(lora="b", max_tokens=9)
    third, plain = job(lora="c"), job()
    for one in (first, second, third, plain):
        engine.submit(one, 0.0)
    due = engine.next_due()
    assert due is not None
    engine.advance(due)  # the engine was idle, so it started the first request at once and alone
    assert set(engine.loras.running) == {"a", "b"}
    assert engine.waiting_loras() == ("c",)
    assert plain.state is JobState.RUNNING
    assert finish(engine, due)[0] is first
    assert third.admitted_at == first.ended_at
    assert engine.loras.loaded == ("b", "c")


def test_loading_an_adapter_takes_time_once() -> None:
    engine = Engine(PLAIN)
    cold, warm = job(1, 1, lora="a"), job(1, 1, lora="a")
    engine.submit(cold, 0.0)
    finish(engine)
    engine.submit(warm, 8.0)
    finish(engine, 8.0)
    assert cold.ended_at == STEP + TOKEN + PLAIN.lora_load_s
    assert warm.ended_at == 8.0 + STEP + TOKEN


def test_a_cancelled_request_frees_its_blocks_at_once() -> None:
    engine = Engine(replace(PLAIN, kv_blocks=8))
    running, waiting = job(64, 64), job(64, 64)
    engine.submit(running, 0.0)
    engine.submit(waiting, 0.0)
    assert engine.pool.in_use == 8
    engine.advance(0.3)
    engine.cancel(running, 0.3)
    assert engine.pool.in_use == 0
    assert finish(engine, 0.3) == [waiting]
    assert waiting.admitted_at >= 0.3
    assert (engine.seen.served, engine.seen.aborted) == (1, 1)


def test_a_waiting_request_can_be_cancelled_and_an_ended_one_stays_ended() -> None:
    engine = Engine(replace(PLAIN, max_running=1))
    one, two = job(), job()
    engine.submit(one, 0.0)
    engine.submit(two, 0.0)
    engine.cancel(two, 0.0)
    assert two.state is JobState.CANCELLED
    assert finish(engine) == [one]
    engine.cancel(one, 9.0)
    assert one.state is JobState.FINISHED
    assert engine.seen.aborted == 1


def test_an_engine_is_idle_after_its_last_request_left() -> None:
    engine, one = Engine(PLAIN), job()
    engine.submit(one, 0.0)
    engine.cancel(one, 0.0)
    assert engine.next_due() is None
    assert engine.advance(5.0) == []


def test_an_embedding_ends_with_its_prefill_and_generates_nothing() -> None:
    engine, one = Engine(PLAIN), job(tokens=64, max_tokens=0)
    engine.submit(one, 0.0)
    assert finish(engine) == [one]
    assert one.generated == 0
    assert one.ended_at == STEP + 64 * TOKEN


def test_a_streaming_request_has_news_for_each_token_and_any_other_only_at_the_end() -> None:
    engine = Engine(PLAIN)
    loud, quiet = job(max_tokens=5, streams=True), job(max_tokens=5)
    engine.submit(loud, 0.0)
    engine.submit(quiet, 0.0)
    news = engine.advance(100.0)
    assert news.count(loud) == 5
    assert news.count(quiet) == 1


def test_steps_that_are_not_visible_outside_need_no_timer() -> None:
    engine, one = Engine(PLAIN), job(tokens=16, max_tokens=33)
    engine.submit(one, 0.0)
    assert engine.next_due() == STEP + 16 * TOKEN + 32 * STEP


@given(looks=st.lists(st.floats(0, 10), max_size=20), streams=st.booleans())
def test_the_number_of_advance_calls_changes_nothing(looks: list[float], *, streams: bool) -> None:
    def run(times: list[float]) -> list[tuple[float, float]]:
        engine = Engine(PLAIN)
        jobs = [job(tokens=32 * n + 16, max_tokens=3 * n + 1) for n in range(8)]
        jobs.append(job(max_tokens=7, streams=streams))
        for one in jobs:
            engine.submit(one, 0.0)
        for now in sorted(times):
            engine.advance(now)
        engine.advance(1000.0)
        return [(one.first_token_at, one.ended_at) for one in jobs]

    assert run(looks) == run([])


def test_equal_calls_give_equal_results() -> None:
    def run() -> list[tuple[float, float, int]]:
        engine = Engine(PLAIN)
        jobs = [Job(list(range(n % 5)), 90, 3 + n % 4) for n in range(20)]
        for n, one in enumerate(jobs):
            engine.advance(n / 100)
            engine.submit(one, n / 100)
        finish(engine, 0.2)
        return [(one.admitted_at, one.ended_at, one.cached_tokens) for one in jobs]

    assert run() == run()


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "cancel", "wait"]),
        st.integers(0, 30),
        st.integers(0, 12),
        st.sampled_from([None, "a", "b", "c"]),
        st.booleans(),
    ),
    max_size=60,
)


@examples(200)
@given(MOVES)
def test_random_arrivals_and_departures_keep_all_invariants(moves: list[tuple[str, int, int, str | None, bool]]) -> None:
    engine = Engine(replace(PLAIN, kv_blocks=10, max_running=3))
    now, jobs = 0.0, list[Job]()
    for kind, number, size, lora, streams in moves:
        if kind == "wait":
            now += number / 64
        engine.advance(now)
        if kind == "arrive":
            hashes = [number % 3 * 100 + n for n in range(size // 2)]
            one = Job(hashes, size * 8 + 1, number % 9, streams=streams, lora=lora)
            engine.submit(one, now)
            jobs.append(one)
        elif kind == "cancel" and jobs:
            engine.cancel(jobs[number % len(jobs)], now)
        check(engine, jobs)
    finish(engine, now)
    check(engine, jobs)
    assert (engine.running, engine.waiting, engine.pool.in_use) == (0, 0, 0)
    assert engine.loras.running == ()
    for one in jobs:
        assert one.state in (JobState.FINISHED, JobState.CANCELLED)
        if one.state is JobState.FINISHED:
            assert one.generated == one.max_tokens
            assert one.arrived_at <= one.admitted_at < one.first_token_at <= one.ended_at
    assert engine.seen.served + engine.seen.aborted == len(jobs)


def check(engine: Engine, jobs: list[Job]) -> None:
    """Checks the invariants."""
    states = [one.state for one in jobs]
    running = [one for one in jobs if one.state is JobState.RUNNING]
    assert engine.running == len(running) <= engine.settings.max_running
    assert engine.waiting == states.count(JobState.WAITING)
    shared = {block for one in running for block in one.hashes}
    private = sum(one.blocks_needed - len(one.hashes) for one in running)
    assert engine.pool.in_use == len(shared) + private <= engine.pool.total
    assert set(engine.loras.running) == {one.lora for one in running if one.lora}
    assert len(engine.loras.loaded) <= engine.settings.max_loras
    if engine.running or engine.waiting:
        assert engine.next_due() is not None


def test_a_muted_request_appears_once_more_when_it_ends() -> None:
    engine, one = Engine(PLAIN), job(tokens=128, max_tokens=40, streams=True)
    engine.submit(one, 0.0)
    first = STEP + 128 * TOKEN
    assert engine.advance(first) == [one]
    engine.mute(one)
    assert engine.next_due() == first + 39 * STEP
    assert engine.advance(first + 39 * STEP) == [one]
    assert one.generated == 40


@pytest.mark.parametrize("before", [0, 1, 2])
def test_the_foreseen_first_token_is_that_of_the_run(before: int) -> None:
    engine = Engine(replace(PLAIN, step_tokens=256))
    one, another = chain(8), chain(8)
    for _ in range(before):
        engine.submit(job(tokens=160), 0.0)
    foreseen = engine.first_token_in([another, one], STEP / 2)
    engine.submit(another, STEP / 2)
    engine.submit(one, STEP / 2)
    finish(engine)
    assert one.first_token_at == STEP / 2 + foreseen


@pytest.mark.parametrize("max_tokens", [3, 20])
def test_the_foreseen_first_token_waits_for_room_in_the_kv_cache(max_tokens: int) -> None:
    engine, one = Engine(replace(PLAIN, kv_blocks=20)), job(tokens=160)
    engine.submit(job(tokens=160, max_tokens=max_tokens), 0.0)
    foreseen = engine.first_token_in([one], STEP / 2)
    assert foreseen > (max_tokens - 1) * STEP
    engine.submit(one, STEP / 2)
    finish(engine)
    assert one.first_token_at == pytest.approx(STEP / 2 + foreseen)


def test_the_rest_of_a_step_is_foreseen_while_steps_pass_unseen() -> None:
    engine, long = Engine(PLAIN), job(tokens=128, max_tokens=40)
    engine.submit(long, 0.0)
    first = STEP + 128 * TOKEN
    engine.advance(first)
    assert engine.first_token_in([job(tokens=64)], first + 5.25 * STEP) == 0.75 * STEP + STEP + 64 * TOKEN


def test_a_step_says_whether_more_than_half_of_it_is_left_unless_it_computes_prompts() -> None:
    engine = Engine(PLAIN)
    assert engine.beyond_half_s(0.0) == 0.0
    engine.submit(job(tokens=128, max_tokens=40), 0.0)
    first = STEP + 128 * TOKEN
    assert engine.beyond_half_s(first / 4) == 0.0, "it computes a prompt"
    engine.advance(first)
    assert engine.beyond_half_s(first + 5.25 * STEP) == pytest.approx(0.25 * STEP)
    assert engine.beyond_half_s(first + 5.75 * STEP) == pytest.approx(-0.25 * STEP)
