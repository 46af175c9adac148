"""After a reload, another fairness policy does not take over how much each flow was served under the policy before."""

import asyncio
from pathlib import Path

import pytest

from epp.config.load import load
from tests.waiting import until
from tests.workers.flow_world import Shard, World, config, world
from workers.process.generations import Bundle

BY_TURN = "{type: program-aware-fairness, parameters: {strategy: turn-priority, turnPriorityInactivitySeconds: 0}}"
BY_TOKENS = "{type: token-weighted-fairness-policy}"
FLOW = "x_llm_d_inference_fairness_id"


def band(policy: str) -> tuple[str, str]:
    """Returns a section of the configuration and a plugin: band 0 with this policy."""
    name = policy.strip("{}").split(",")[0].removeprefix("type: ")
    return f"priorityBands: [{{priority: 0, fairnessPolicyRef: {name}}}]", policy


def reload(shard: Shard, policy: str) -> None:
    """Puts a configuration with this policy in force."""
    text = config(*band(policy))
    later = shard.instance.under(load(text, "c.yaml"), Bundle(2, "c.yaml", text, "", {}, shard.instance.layout.names, 0.0))
    shard.parts = shard.parts.under(later, later.memory.areas.area(shard.index + 1))
    shard.app = shard.parts.app


async def served(shard: Shard, *flows: str) -> list[str]:
    """One request of each flow waits. Returns the flows in the order in which they are served."""
    held = shard.ask("held")
    asked = [shard.ask(flow, **{FLOW: flow}) for flow in flows]
    assert all(each.waits for each in asked)
    order: list[str] = []
    held.end()
    while len(order) < len(asked):
        await until(lambda: any(each.sent and each.name not in order for each in asked))
        (sent,) = [each for each in asked if each.sent and each.name not in order]
        order.append(sent.name)
        sent.end()
    return order


@pytest.mark.parametrize(
    ("before", "after"), [(BY_TURN, BY_TOKENS), (BY_TOKENS, BY_TURN)], ids=["from turns to tokens", "from tokens to turns"]
)
def test_a_flow_begins_anew_under_a_policy_that_measures_service_in_another_unit(tmp_path: Path, before: str, after: str) -> None:
    async def test(w: World) -> None:
        one, two = w.shards
        for _ in range(3):
            await served(two, "known")
        for shard in w.shards:
            reload(shard, after)
        assert await served(one, "first", "known", "last") == ["first", "known", "last"], "all flows are new"

    async def run() -> None:
        async with world(tmp_path, *band(before), shards=2) as w:
            await test(w)

    asyncio.run(asyncio.wait_for(run(), 20))
