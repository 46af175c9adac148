"""Requests that servers refuse displace no prefixes of others: the producer of one worker, with a real index."""

import pytest

from epp.decision.decision import Decision, ProfileRun, Response
from epp.plugins.producers.approx_prefix import ApproximatePrefix
from epp.prefix.match import prefix_match
from epp.request import Request
from tests.fakes import FakeServices, candidates, request
from tests.workers.worker.test_index_tier import Index
from workers.shared.index_limits import IndexLimits, prefix_use

BLOCK_BYTES = 256
CACHE_BLOCKS = 500  # of the index: 32,000 tokens
SERVER_BLOCK_TOKENS = 16
POOL = candidates({"cache_block_size": [SERVER_BLOCK_TOKENS] * 3, "cache_tokens": [CACHE_BLOCKS * 64] * 3})
RUN = ProfileRun(POOL, POOL.zeros(), [1])
DECISION = Decision(RUN.targets, {"default": RUN}, "default")


class World:
    """One endpoint with a full cache: `others` are the prompts that it holds."""

    def __init__(self) -> None:
        self.index, services = Index(), FakeServices()
        services.prefix_index = self.index
        self.producer = ApproximatePrefix("p", ApproximatePrefix.Params())
        self.producer.start(services)
        owner = RUN.target.owner
        while owner not in self.index.writer.owners():
            self.index.writer.new_owner()
        IndexLimits(self.index.writer, prefix_use([self.producer]), ()).appeared(owner)
        self.index.writer.limit(owner, CACHE_BLOCKS)
        self.others = [prompt(f"other {number}", 20) for number in range(25)]
        for other in self.others:
            self.answered(self.sent(other))

    def sent(self, text: bytes) -> Request:
        asked = request(text)
        self.producer.produce(asked, POOL)
        self.producer.before_send(asked, DECISION)
        return asked

    def begun(self, asked: Request) -> None:
        self.producer.response_streaming(asked, DECISION)

    def answered(self, asked: Request, status: int = 200) -> None:
        response = Response(status)
        response.whole = True
        self.producer.response_complete(asked, DECISION, response)

    def held(self, text: bytes) -> int:
        asked = request(text)
        self.producer.produce(asked, POOL)
        match = asked[prefix_match("p")]
        return 0 if match.blocks is None else int(match.blocks[RUN.row])

    def held_of_others(self) -> list[int]:
        return [self.held(other) for other in self.others]


def prompt(name: str, blocks: int) -> bytes:
    return b"".join(f"{name} {number:9}".encode().ljust(BLOCK_BYTES, b".") for number in range(blocks))


@pytest.fixture
def world() -> World:
    world = World()
    assert world.held_of_others() == [20] * 25
    return world


@pytest.mark.parametrize("blocks", [10, 400, 5600])
@pytest.mark.parametrize("at_once", [1, 40])
def test_a_flood_of_refused_prompts_displaces_nothing(world: World, blocks: int, at_once: int) -> None:
    """5,600 blocks are a body of 1.4 MiB, which no server of the pool can hold."""
    for round_ in range(40 // at_once):
        refused = [world.sent(prompt(f"refused {round_} {number}", blocks)) for number in range(at_once)]
        for asked in refused:
            world.answered(asked, 400)
    assert world.held_of_others() == [20] * 25
    assert world.held(prompt("refused 0 0", blocks)) == 0


def test_a_prompt_that_waits_for_its_first_token_is_known_as_under_way_and_learned_then(world: World) -> None:
    long = prompt("long", 300)
    asked = world.sent(long)
    assert world.held(long) == 300, "siblings find its prefill"
    assert world.index.writer.held(RUN.target.owner) == 500
    world.begun(asked)
    assert world.held(long) == 300
    assert min(world.held_of_others()) == 0, "the server has computed it, so it has no room for the others"


def test_a_prompt_longer_than_the_cache_is_never_learned(world: World) -> None:
    longer = prompt("longer", CACHE_BLOCKS + 1)
    asked = world.sent(longer)
    world.begun(asked)
    world.answered(asked)
    assert world.held(longer) == 0
    assert world.held_of_others() == [20] * 25


def test_what_waits_is_counted_until_the_first_token_or_the_end(world: World) -> None:
    for round_ in range(50):
        first, second = (world.sent(prompt(f"{round_} {number}", 12)) for number in range(2))
        assert world.index.match(first[prefix_match("p")].hashes), "there is room for one of them"
        assert not world.index.match(second[prefix_match("p")].hashes)
        world.begun(first)
        world.answered(first)
        world.answered(second, 400 if round_ % 2 else 200)
        assert bool(world.index.match(second[prefix_match("p")].hashes)) is not bool(round_ % 2)
