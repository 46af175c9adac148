"""A server that becomes slower: everything takes the factor times as long, from then on."""

from loadtest.sim.engine import Engine, EngineSettings, Job
from loadtest.sim.server_model import ServerModel
from loadtest.sim.slots import SlotServer
from loadtest.sim.slowed import SlowedServer

SLOTS = EngineSettings(max_running=1, kv_blocks=64, overhead_s=0.25, prefill_s_per_token=1 / 64, decode_s=0.125)


def slowed(factor: float = 1.0) -> SlowedServer:
    return SlowedServer(SlotServer(SLOTS), factor)


def run(server: ServerModel) -> list[tuple[float, Job]]:
    """Runs to the end of all work. Returns the news, each with its time."""
    news = []
    while (due := server.next_due()) is not None:
        for job in server.advance(due):
            server.mute(job)
            news.append((due, job))
    return news


def test_a_factor_from_the_start_multiplies_all_times() -> None:
    server, one = slowed(3.0), Job([], 48, 3, streams=True)
    assert server.first_token_in([one], 6.0) == 3.0
    server.submit(one, 6.0)
    assert run(server) == [(9.0, one), (9.75, one)]  # 3 * (0.25 + 48 / 64); then 3 * 2 * 0.125


def test_what_has_begun_takes_the_factor_times_its_rest() -> None:
    server, one = slowed(), Job([], 48, 1)
    server.submit(one, 6.0)
    server.advance(6.5)
    server.slow(3.0, 6.5)
    assert run(server) == [(8.0, one)]  # half of it took 0.5 s, the other half takes 1.5 s


def test_it_may_become_fast_again() -> None:
    server, one = slowed(4.0), Job([], 48, 1)
    server.submit(one, 0.0)
    server.slow(1.0, 2.0)
    assert run(server) == [(2.5, one)]


def test_counts_and_cache_are_those_of_the_model() -> None:
    server = slowed(2.0)
    jobs = [Job([7], 17, 1), Job([8], 17, 1)]
    for job in jobs:
        server.submit(job, 0.0)
    assert (server.running, server.waiting) == (1, 1)
    server.cancel(jobs[1], 0.0)
    assert server.waiting == 0
    run(server)
    assert server.pool.hits([7]) == 1


def test_every_result_of_a_due_time_comes_at_that_time_whatever_the_rounding() -> None:
    server = SlowedServer(Engine(EngineSettings()))
    server.slow(3.0, 0.1)
    for number in range(50):
        server.submit(Job([], 100 + number, 7, streams=True), 0.1)
    served = 0
    while (due := server.next_due()) is not None:
        news = server.advance(due)
        assert news
        served += len(news)
    assert served == 50 * 7


def test_what_is_left_of_a_step_takes_the_factor_as_long() -> None:
    server = SlowedServer(Engine(EngineSettings(decode_s=0.25, decode_growth=0.0, prefill_s_per_token=0.0)), 4.0)
    server.submit(Job([], 16, 9), 0.0)
    server.advance(1.0)
    assert server.beyond_half_s(1.25) == 0.25
    assert slowed(4.0).beyond_half_s(1.25) == 0.0, "slots have no steps"
