"""What works but breaks the contract is logged once per plugin. Faults of peers are counted by cause, and logged at a limited rate."""

from structlog.testing import capture_logs

from epp.metrics.request_series import ABUSE
from epp.plugin import NoParams, Plugin, Scorer
from epp.plugins.scorers.reported import QueueDepth
from shm.areas import Areas, AreaSchema
from shm.segment import Region
from shm.series import SeriesWriter
from shm.series_reader import SeriesReader
from workers.process.layout import series_schema_of
from workers.transport.abuse import CAUSES
from workers.worker.faults import Faults, PeerFaults


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


def test_faults_are_counted_by_cause_and_logged_at_a_limited_rate() -> None:
    schema = series_schema_of(ABUSE, areas=1)
    region = Region(memoryview(bytearray(schema.bytes)))
    lines: list[tuple[str, int, str]] = []

    def report(event: str, *, times: int, last: str) -> None:
        lines.append((event, times, last))

    faults = PeerFaults(SeriesWriter(schema, schema.area(region, 0)), report, lambda: 5.0)
    for cause in ("pings", "handshake failed: one reason", "handshake failed: another", "pings", "slow_body"):
        faults(cause)
    rows = SeriesReader(schema, region, serving=lambda _: True).rows()
    counted = {labels[0]: values.counters[0] for labels, values in rows.items()}
    assert counted == {"pings": 2, "handshake_failed": 2, "slow_body": 1}
    assert lines == [("peers' faults", 1, "pings"), ("peers' faults", 1, "handshake failed: one reason"), ("peers' faults", 1, "slow_body")]


def test_there_is_room_for_every_cause() -> None:
    assert len(CAUSES) + 2 < ABUSE.blocks
