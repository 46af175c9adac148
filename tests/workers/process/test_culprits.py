"""The parent says what has ended a worker: the pool, and the plugin that ran."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from epp.config.load import load
from epp.request.pool_choice import Matched, PoolChoice
from tests.workers.instances import options, removed
from workers.host.exit_codes import ExitCode
from workers.process import pool_views
from workers.process.culprits import Culprits
from workers.process.generations import Bundle, Given, TrialResult
from workers.process.places import Pool
from workers.shared.pool_crashes import RUNNING, word_of

TEXT = "plugins: [{type: queue-scorer, name: first}]\n"


@pytest.mark.parametrize(("plugin", "named"), [("first", "first"), ("later", "later"), ("tried", "tried"), ("unknown", None)])
def test_the_log_names_the_plugin_that_has_ended_a_worker_also_after_a_reload(tmp_path: Path, plugin: str, named: str | None) -> None:
    pools = [Pool(name, Given(TEXT, "c.yaml", {}), load(TEXT, "c.yaml"), "127.0.0.1:1", 4) for name in ("a", "b")]
    choice = PoolChoice([Matched(name, 0, (f"{name}.svc",)) for name in ("a", "b")])
    with removed(pool_views.create(options(tmp_path, max_endpoints=8), pools, choice, {})) as instance, capture_logs() as lines:
        culprits, generations = Culprits(instance), instance.pools[1].generations
        for slot, name in enumerate(("later", "tried")):
            bundle = Bundle(2 + slot, "c.yaml", TEXT, "", {}, instance.layout.names, 0.0, pool="b", foreign=(name,))
            generations.store(slot, TrialResult(0, "", bundle))
        generations.publish(0, 2)
        generations.try_out(1, 3)
        area = instance.memory.areas.area(1)
        area.scalars[area.schema.scalar[RUNNING]] = word_of(1, plugin)
        assert culprits.pool_ended(1, "worker 1", ExitCode.OK, crashed=True) == 1
    assert [(line["pool"], line.get("plugin")) for line in lines if "ended while" in line["event"]] == [("b", named)]
