"""The model of a server in a replay."""

from workers.cli.replay.servers import UNBOUNDED, Job, Server, Speed

SPEED = Speed(overhead_s=0.5, prefill_s=0.01, decode_s=0.1, slots=2, cache_tokens=UNBOUNDED, samples=0)


def job(number: int, *blocks: int, output: int = 1) -> Job:
    return Job(number, list(blocks), 100, 100 * len(blocks), output)


def test_prompts_are_computed_one_after_the_other_and_answers_side_by_side() -> None:
    server = Server(SPEED)
    (one,) = server.submit(job(1, 1, output=11), 0.0)
    (two,) = server.submit(job(2, 2), 0.0)
    assert (one.first_at, one.ended_at) == (1.5, 2.5)
    assert two.first_at == 2.5


def test_a_request_waits_for_a_slot() -> None:
    server = Server(SPEED)
    assert len([*server.submit(job(1, 1), 0.0), *server.submit(job(2, 2), 0.0)]) == 2
    assert list(server.submit(job(3, 3), 0.0)) == [] and server.waiting == 1
    (third,) = server.ended(4.0)
    assert (third.job.number, third.first_at) == (3, 5.5)


def test_cached_blocks_are_not_computed_again_and_the_last_token_always_is() -> None:
    server = Server(SPEED)
    list(server.submit(job(1, 1, 2), 0.0))
    (again,) = server.submit(job(2, 1, 2), 10.0)
    assert again.cached_tokens == 199


def test_a_full_cache_forgets_what_was_unused_longest_and_ends_of_prompts_first() -> None:
    server = Server(Speed(0.5, 0.01, 0.1, UNBOUNDED, 200, 0))
    list(server.submit(job(1, 1, 2), 0.0))
    list(server.submit(job(2, 3), 1.0))
    (again,) = server.submit(job(3, 1, 2), 2.0)
    assert again.cached_tokens == 100
