"""Faults of peers are counted by cause. Only the log has their details, at a limited rate."""

from epp.metrics.series import ABUSE
from shm.segment import Region
from shm.series import SeriesWriter
from shm.series_reader import SeriesReader
from workers.process.layout import series_schema_of
from workers.transport.abuse import CAUSES
from workers.worker.extproc.peer_faults import PeerFaults


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
