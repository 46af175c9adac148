"""What the published formulas learn of the servers from the course of requests."""

from collections.abc import Sequence

import pytest

from tests.bench.routing_blocks import Blocks
from tests.bench.routing_fleet import Call, Fleet
from tests.bench.routing_ledger import BIAS_SHARE, FIRST_RATE, Ledger, Prompt, Server
from tests.bench.routing_servers import KINDS
from tests.bench.routing_traffic import BLOCK_TOKENS, WORKLOADS, Turn

SCRAPED = KINDS[0].make(1, 100, lambda server, job, changes: None)[0]


class Watched:
    """A formula that prefers servers in the order of their ids, and keeps what it was asked."""

    def __init__(self) -> None:
        self.prompt = Prompt(0)
        self.servers: Sequence[Server] = ()

    def __call__(self, prompt: Prompt, servers: Sequence[Server]) -> Sequence[float]:
        self.prompt, self.servers = prompt, servers
        return [server.id for server in servers]


def call(prompt: bytes, output: int = 10, id: int = 0) -> Call:
    return Call(id, Turn(prompt, output), 0.0, 0, iter(()))


@pytest.fixture
def seen() -> Watched:
    return Watched()


@pytest.fixture
def ledger(seen: Watched) -> Ledger:
    ledgers: list[Ledger] = []

    def make(fleet: Fleet) -> Ledger:
        ledgers.append(Ledger(fleet, seen, 1))
        return ledgers[0]

    Fleet([], make, 1, kind=KINDS[0], workload=WORKLOADS[0], seconds=1.0)
    return ledgers[0]


def sent(ledger: Ledger, one: Call, now: float) -> Server:
    """Sends a request, and returns what the ledger knows of its server."""
    one.server = ledger.choose(one, now)
    return ledger._servers[one.server]


def test_tokens_are_pending_until_the_first_token_and_requests_in_flight_until_the_end(ledger: Ledger) -> None:
    one, other = call(b"a" * 400), call(b"b" * 800)
    server = sent(ledger, one, 0.0)
    sent(ledger, other, 0.0)
    assert (server.pending, server.inflight) == (300, 2)
    ledger.first_token(one, 1.0)
    assert (server.pending, server.inflight) == (200, 2)
    ledger.ended(one, 2.0)
    assert (server.pending, server.inflight) == (200, 1)
    ledger.failed(other, 2.0)
    assert (server.pending, server.inflight) == (0, 0)


def test_a_scrape_divides_what_is_queued_from_what_was_sent_since(ledger: Ledger) -> None:
    one, other = call(b"a" * 400), call(b"b" * 800)
    server = sent(ledger, one, 0.0)
    assert (server.queued, server.since) == (0, 100)
    ledger.scraped(0, SCRAPED, 0.1)
    assert (server.queued, server.since) == (100, 0)
    sent(ledger, other, 0.2)
    assert (server.queued, server.since) == (100, 200)
    ledger.first_token(one, 0.3)
    assert (server.queued, server.since) == (100, 200)  # the last scrape still says so
    ledger.first_token(other, 0.4)
    assert (server.queued, server.since) == (100, 0)
    ledger.scraped(0, SCRAPED, 0.5)
    assert (server.queued, server.since) == (0, 0)


def test_blocks_in_flight_count_once(ledger: Ledger, seen: Watched) -> None:
    shared = bytes(range(64)) * 4
    one, other = call(shared + b"a" * 64), call(shared + b"b" * 128)
    sent(ledger, one, 0.0)
    assert seen.servers[0].held == 5 * BLOCK_TOKENS
    sent(ledger, other, 0.0)
    assert seen.servers[0].held == (4 + 1 + 2) * BLOCK_TOKENS
    ledger.ended(one, 1.0)
    ledger.ended(other, 1.0)
    sent(ledger, call(b"c" * 64), 2.0)
    assert seen.servers[0].held == BLOCK_TOKENS


def test_speed_and_bias_are_learnt_from_the_time_to_the_first_token(ledger: Ledger) -> None:
    first, second = call(b"a" * 40_000), call(b"b" * 40_000)
    server = sent(ledger, first, 0.0)
    sent(ledger, second, 0.0)
    ledger.first_token(first, 2.0)  # 10,000 tokens
    assert server.rate == 5_000.0
    assert server.bias_s == pytest.approx(BIAS_SHARE * (2.0 - 10_000 / FIRST_RATE))
    ledger.first_token(second, 4.0)  # 10,000 tokens behind 10,000
    assert server.rate == 5_000.0


def test_a_server_that_refuses_two_scrapes_gets_no_requests(ledger: Ledger, seen: Watched) -> None:
    ledger.refused(0, 0.0)
    assert sent(ledger, call(b"a" * 400), 0.0).id == 0
    ledger.refused(0, 0.1)
    assert sent(ledger, call(b"b" * 400), 0.1).id == 1
    ledger.scraped(0, SCRAPED, 0.2)
    assert sent(ledger, call(b"c" * 400), 0.2).id == 0
    ledger.members([3, 4])
    assert sent(ledger, call(b"d" * 400), 0.3).id == 3
    assert [server.id for server in seen.servers] == [3, 4]


def test_blocks_count_their_prompts() -> None:
    blocks = Blocks()
    blocks.add([1, 2, 3])
    blocks.add([1, 2, 4])
    assert len(blocks) == 4
    assert blocks.count_with([1, 2, 3, 5, 6]) == 6
    blocks.remove([1, 2, 3])
    assert [block for block in range(6) if block in blocks] == [1, 2, 4]
