"""Prefix producers with different capacities see different tiers of one index."""

from collections.abc import Mapping

from epp.decision.decision import Decision, ProfileRun
from epp.plugin import Hashes
from epp.plugins.producers.approx_prefix import ApproximatePrefix
from epp.prefix.match import assign_tiers, prefix_match
from epp.request import Request
from shm.prefix_index import IndexReader, IndexSchema
from shm.prefix_writer import TieredWriter
from shm.segment import Region
from tests.fakes import FakeServices, candidates, request
from workers.shared.index_limits import IndexLimits, prefix_use
from workers.worker.plugin_handles import IndexTier

PROMPT_BLOCKS = 16
SCHEMA = IndexSchema(1 << 13)


class Index:
    """An `epp.plugin.PrefixIndex` whose updates arrive at once."""

    def __init__(self) -> None:
        region = Region(memoryview(bytearray(SCHEMA.bytes)))
        self.writer, self.match = TieredWriter(SCHEMA, region), IndexReader(SCHEMA, region).match
        self.age = 0

    def learn(self, hashes: Hashes, owner: int) -> None:
        self.age += 1
        self.writer.insert(hashes, owner, self.age)

    def forget(self, hashes: Hashes, owner: int) -> None:
        self.writer.forget(hashes, owner)


def prompt(number: int) -> Request:
    return request(b"%06d--" % number * 32 * PROMPT_BLOCKS)


def started(index: Index, producers: Mapping[str, ApproximatePrefix]) -> None:
    assign_tiers(producers.values())
    for producer in producers.values():
        services = FakeServices()
        services.prefix_index = IndexTier(index, producer.tier) if producer.tier else index
        producer.start(services)


def test_a_prompt_that_the_first_tier_has_no_room_for_is_matched_in_the_second_one() -> None:
    gpu = ApproximatePrefix("gpu", ApproximatePrefix.Params(lru_capacity_per_server=4 * PROMPT_BLOCKS))
    cpu = ApproximatePrefix("cpu", ApproximatePrefix.Params(lru_capacity_per_server=40 * PROMPT_BLOCKS))
    index, those = Index(), candidates(count=3)
    run = ProfileRun(those, those.zeros(), [1])
    owner = run.target.owner
    while owner not in index.writer.owners():
        index.writer.new_owner()
    started(index, {"gpu": gpu, "cpu": cpu})
    IndexLimits(index.writer, prefix_use([gpu, cpu]), ()).appeared(owner)
    decision = Decision(run.targets, {"default": run}, "default")
    for number in range(12):
        sent = prompt(number)
        for producer in (gpu, cpu):
            producer.produce(sent, those)
            producer.before_send(sent, decision)
            producer.response_streaming(sent, decision)
    held = []
    for number in (0, 11):
        again = prompt(number)
        for producer in (gpu, cpu):
            producer.produce(again, those)
            match = again[prefix_match(producer.name)]
            held.append(0 if match.blocks is None else int(match.blocks[run.row]))
    assert held == [0, PROMPT_BLOCKS, PROMPT_BLOCKS, PROMPT_BLOCKS]
