"""The model with slots, with a clock that the test sets. Times are sums of powers of two, so they are exact."""

from loadtest.sim.engine import EngineSettings, Job, JobState
from loadtest.sim.slots import SlotServer

SETTINGS = EngineSettings(max_running=2, kv_blocks=64, block_size=16, overhead_s=0.25, prefill_s_per_token=1 / 64, decode_s=0.125)


def job(tokens: int, output: int = 1) -> Job:
    return Job([], tokens, output, streams=True)


def chain(blocks: int, more: int, output: int = 1, root: int = 0) -> Job:
    return Job([root * 1000 + n for n in range(blocks)], blocks * 16 + more, output, streams=True)


def run(server: SlotServer) -> list[tuple[float, Job]]:
    """Runs to the end of all work. Returns first tokens and ends, each with its time."""
    news = []
    while (due := server.next_due()) is not None:
        for one in server.advance(due):
            server.mute(one)
            news.append((due, one))
    return news


def test_a_request_takes_overhead_prefill_and_a_constant_time_per_further_token() -> None:
    server, one = SlotServer(SETTINGS), job(64, output=5)
    server.submit(one, 10.0)
    assert run(server) == [(11.25, one), (11.75, one)]  # 0.25 + 64 / 64; then 4 * 0.125
    assert (one.first_token_at, one.ended_at, one.generated, one.state) == (11.25, 11.75, 5, JobState.FINISHED)


def test_a_streamed_answer_is_news_per_token_until_it_is_muted_and_any_other_only_at_its_end() -> None:
    server, one, two = SlotServer(SETTINGS), job(64, output=4), Job([], 32, 4)
    server.submit(one, 0.0)
    server.submit(two, 0.0)
    news = []
    while (due := server.next_due()) is not None:
        news += [(due, each, each.generated) for each in server.advance(due)]
        if one.generated == 3:
            server.mute(one)
    assert news == [(1.125, two, 4), (1.25, one, 1), (1.375, one, 2), (1.5, one, 3), (1.625, one, 4)]
    assert two.first_token_at == 0.75
    assert (server.seen.served, server.seen.prompt_tokens, server.seen.generation_tokens) == (2, 96, 8)


def test_an_embedding_takes_a_slot_until_its_prompt_is_computed() -> None:
    server, one = SlotServer(SETTINGS), Job([], 64, 0)
    server.submit(one, 0.0)
    assert run(server) == [(1.25, one)]
    assert (one.generated, one.state) == (0, JobState.FINISHED)


def test_requests_in_slots_do_not_slow_each_other_down() -> None:
    server, one, two = SlotServer(SETTINGS), job(64), job(32)
    server.submit(one, 0.0)
    server.submit(two, 0.0)
    assert run(server) == [(0.75, two), (1.25, one)]


def test_without_a_free_slot_requests_wait_in_order_until_one_ends() -> None:
    server = SlotServer(SETTINGS)
    one, two, three, four = job(64, output=9), job(32), job(16), job(16)
    for each in (one, two, three, four):
        server.submit(each, 0.0)
    assert (server.running, server.waiting) == (2, 2)
    # one: 1.25 to 2.25; two ends at 0.75, then three: 0.25 + 0.25, then four
    assert run(server) == [(0.75, two), (1.25, one), (1.25, three), (1.75, four), (2.25, one)]


def test_cached_blocks_are_not_computed_again() -> None:
    server, cold, warm = SlotServer(SETTINGS), chain(4, 16), chain(4, 16)
    server.submit(cold, 0.0)
    assert run(server) == [(1.5, cold)]  # 0.25 + 80 / 64
    server.submit(warm, 10.0)
    assert run(server) == [(10.5, warm)]  # 0.25 + 16 / 64
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 64)


def test_a_request_waits_for_blocks_that_another_one_is_computing() -> None:
    server, first, second = SlotServer(SETTINGS), chain(4, 16), chain(4, 16)
    server.submit(first, 0.0)
    server.submit(second, 1.0)
    assert run(server) == [(1.5, first), (2.0, second)]  # ready at 1.5, then 0.25 + 16 / 64
    assert second.cached_tokens == 64


def test_the_head_of_the_queue_waits_for_blocks_and_nothing_overtakes_it() -> None:
    server = SlotServer(SETTINGS)
    large, larger, small = job(640), job(640), job(16)  # 41 of 64 blocks each
    for each in (large, larger, small):
        server.submit(each, 0.0)
    assert (server.running, server.waiting) == (1, 2)
    assert [each for _, each in run(server)] == [large, small, larger]


def test_the_foreseen_first_token_is_that_of_the_run() -> None:
    for before in (0, 1, 2, 5):
        server, one = SlotServer(SETTINGS), chain(4, 16)
        for number in range(before):
            server.submit(chain(4, 8, output=1 + 3 * number, root=number % 2), 0.0)
        foreseen = server.first_token_in([one], 0.5)
        server.advance(0.5)
        server.submit(one, 0.5)
        run(server)
        assert one.first_token_at == 0.5 + foreseen


def test_the_foreseen_first_token_waits_for_room_in_the_kv_cache() -> None:
    server, one = SlotServer(SETTINGS), job(640)
    server.submit(job(640, output=9), 0.0)
    foreseen = server.first_token_in([one], 0.5)
    assert foreseen > 10.25 + 1.0
    server.advance(0.5)
    server.submit(one, 0.5)
    run(server)
    assert one.first_token_at == 0.5 + foreseen


def test_a_cancelled_request_gives_its_slot_to_the_next() -> None:
    server, one, two, three = SlotServer(SETTINGS), job(64), job(64), job(64)
    for each in (one, two, three):
        server.submit(each, 0.0)
    server.cancel(one, 1.0)
    server.cancel(one, 1.0)
    assert one.state is JobState.CANCELLED
    assert run(server) == [(1.25, two), (2.25, three)]
