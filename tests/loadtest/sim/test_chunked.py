"""The model with chunked prefill, with a clock that the test sets. Times are sums of powers of two, so they are exact."""

import pytest

from loadtest.sim.chunked import ChunkedServer, ChunkedSettings
from loadtest.sim.engine import Job, JobState

SETTINGS = ChunkedSettings(max_running=4, kv_blocks=64, step_tokens=32, prefill_s_per_token=1 / 64, decode_s=0.25, decode_growth=0.0)


def job(tokens: int, output: int = 1) -> Job:
    return Job([], tokens, output)


def chain(blocks: int, more: int, output: int = 1) -> Job:
    return Job(list(range(blocks)), blocks * 16 + more, output)


def run(server: ChunkedServer) -> list[tuple[float, Job]]:
    """Runs to the end of all work. Returns the news, each with its time."""
    news = []
    while (due := server.next_due()) is not None:
        news += [(due, job) for job in server.advance(due)]
    return news


def test_a_prompt_within_the_budget_takes_one_step() -> None:
    server, one = ChunkedServer(SETTINGS), job(32, output=3)
    server.submit(one, 10.0)
    assert run(server) == [(10.75, one), (11.25, one)]  # 0.25 + 32 / 64; then 2 * 0.25
    assert (one.first_token_at, one.ended_at, one.generated, one.state) == (10.75, 11.25, 3, JobState.FINISHED)


def test_a_longer_prompt_takes_a_step_per_budget() -> None:
    server, one = ChunkedServer(SETTINGS), job(80)
    server.submit(one, 0.0)
    assert run(server) == [(2.0, one)]  # 3 * 0.25 + 80 / 64


def test_prompts_are_computed_in_order_and_the_next_takes_what_a_step_has_left() -> None:
    server, long, short = ChunkedServer(SETTINGS), job(48), job(16)
    server.submit(long, 0.0)
    server.submit(short, 0.0)
    assert run(server) == [(1.5, long), (1.5, short)]  # 32, then 16 + 16 tokens


def test_a_long_prompt_slows_decodes_down_but_does_not_stop_them() -> None:
    server, steady, long = ChunkedServer(SETTINGS), job(32, output=3), job(64)
    server.submit(steady, 0.0)
    server.submit(long, 0.5)
    # Step 1 to 0.75: 32 tokens. Then 1 token for the decode and 31, 31 and 2 tokens of the prompt.
    assert run(server) == [(0.75, steady), (0.75 + 2 * 0.25 + 62 / 64, steady), (0.75 + 3 * 0.25 + 64 / 64, long)]


def test_a_step_takes_longer_with_more_requests() -> None:
    server = ChunkedServer(ChunkedSettings(step_tokens=32, prefill_s_per_token=1 / 64, decode_s=0.25, decode_growth=1))
    one, two = job(16), job(16)
    server.submit(one, 0.0)
    assert run(server) == [(0.5, one)]
    server.submit(one := job(16), 1.0)
    server.submit(two, 1.0)  # enters in the next step
    assert run(server) == [(1.5, one), (2.0, two)]


def test_a_request_enters_with_the_blocks_that_earlier_ones_compute() -> None:
    server, first, second = ChunkedServer(SETTINGS), chain(3, 1), chain(3, 1)
    server.submit(first, 0.0)
    server.submit(second, 0.0)
    assert run(server) == [(0.5 + 50 / 64, first), (0.5 + 50 / 64, second)]
    assert (first.cached_tokens, second.cached_tokens) == (0, 48)


def test_a_full_batch_lets_nobody_in_until_a_request_ends() -> None:
    server = ChunkedServer(SETTINGS)
    jobs = [job(4, output=2) for _ in range(5)]
    server.submit(job(4, output=1), 0.0)
    for each in jobs:
        server.submit(each, 0.0)
    first = 0.25 + 4 / 64
    second = first + 0.25 + 16 / 64
    third = second + 0.25
    news = run(server)
    assert [at for at, each in news if each is jobs[3]] == [second, third]
    assert [at for at, each in news if each is jobs[4]] == [third + 0.25 + 4 / 64, third + 2 * 0.25 + 4 / 64]


def test_steps_without_news_are_passed_in_one_go() -> None:
    server, one = ChunkedServer(SETTINGS), job(32, output=101)
    server.submit(one, 0.0)
    assert server.next_due() == 0.75
    assert server.advance(0.75) == [one]
    assert server.next_due() == 25.75
    assert server.advance(10.0) == []
    server.submit(two := job(8), 10.1)  # within the step that ends at 10.25
    assert run(server) == [(10.25 + 0.25 + 8 / 64, two), (25.75 + 8 / 64, one)]


@pytest.mark.parametrize("before", [0, 1, 3])
def test_the_foreseen_first_token_is_that_of_the_run(before: int) -> None:
    server, one = ChunkedServer(SETTINGS), chain(3, 8)
    for _ in range(before):
        server.submit(job(64), 0.0)
    foreseen = server.first_token_in([one], 0.25)
    server.submit(one, 0.25)
    run(server)
    assert one.first_token_at == 0.25 + foreseen


@pytest.mark.parametrize("at", [0.5, 22.0])
def test_the_foreseen_first_token_waits_for_room_in_the_kv_cache(at: float) -> None:
    """The first request computes its prompt, or generates."""
    server, one = ChunkedServer(SETTINGS), job(640)
    server.submit(job(640, output=40), 0.0)
    server.advance(at)
    foreseen = server.first_token_in([one], at)
    server.submit(one, at)
    run(server)
    assert one.first_token_at == pytest.approx(at + foreseen, rel=0.2)


def test_a_cancelled_request_leaves_the_batch() -> None:
    server, one, two = ChunkedServer(SETTINGS), job(64), job(16)
    server.submit(one, 0.0)
    server.submit(two, 0.0)
    server.cancel(one, 0.5)
    assert one.state is JobState.CANCELLED
    assert run(server) == [(0.75 + 0.5, two)]
    assert server.pool.in_use == 0


def test_a_step_says_whether_more_than_half_of_it_is_left_unless_it_computes_prompts() -> None:
    server = ChunkedServer(SETTINGS)
    assert server.beyond_half_s(0.0) == 0.0
    server.submit(job(32, output=9), 0.0)
    assert server.beyond_half_s(0.125) == 0.0, "it computes a prompt"
    server.advance(0.75)
    assert [server.beyond_half_s(0.75 + at) for at in (0.0625, 0.125, 0.1875)] == [0.0625, 0.0, -0.0625]
