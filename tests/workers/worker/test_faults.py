"""What works but breaks the contract is logged once per plugin."""

from structlog.testing import capture_logs

from epp.plugin import NoParams, Plugin, Scorer
from epp.plugins.scorers.reported import QueueDepth
from shm.areas import Areas, AreaSchema
from shm.segment import Region
from workers.worker.faults import Faults


def test_remarks_and_blocking_calls_are_logged_once_per_plugin() -> None:
    schema = AreaSchema(1, (), (), (), areas=1)
    faults = Faults(Areas(schema, Region(memoryview(bytearray(schema.bytes)))).area(0))
    with capture_logs() as lines:
        for name in ("a", "a", "b"):
            plugin = QueueDepth(name, NoParams())
            faults.remark(plugin, "odd")
            faults.blocked(plugin, "Scorer", 0.0624)
    told = [(line["event"], line["plugin"], line.get("cpu_ms")) for line in lines]
    odd, blocks = "plugin breaks its contract", "plugin blocks the worker"
    assert told == [(odd, "a", None), (blocks, "a", 62), (odd, "b", None), (blocks, "b", 62)]


class Foreign(Scorer):
    """A plugin that is not shipped."""


def test_only_authors_of_plugins_get_advice_on_how_not_to_block_the_worker() -> None:
    def told(plugin: Plugin) -> str:
        schema = AreaSchema(1, (), (), (), areas=1)
        faults = Faults(Areas(schema, Region(memoryview(bytearray(schema.bytes)))).area(0))
        with capture_logs() as lines:
            faults.blocked(plugin, "Scorer", 0.06)
        return str(lines[0]["why"])

    assert told(QueueDepth("a", NoParams())) == "all other requests of this worker waited meanwhile"
    assert told(Foreign("a", NoParams())).endswith(": let work that takes long go through `services`")
