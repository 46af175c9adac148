"""Faults of peers are counted by cause; what varies goes to the log alone, and not every time."""

from epp.metrics import ABUSE
from shm.segment import Region
from shm.series import SeriesReader, SeriesWriter
from workers.instance import series_schema_of
from workers.log import Rarely
from workers.peer_faults import PeerFaults
from workers.transport.abuse import CAUSES


def test_faults_are_counted_by_cause_and_told_now_and_then() -> None:
    schema = series_schema_of(ABUSE, lanes=1)
    region = Region(memoryview(bytearray(schema.bytes)))
    said: list[str] = []
    faults = PeerFaults(SeriesWriter(schema, schema.lane(region, 0)), Rarely("peers' faults", said.append), lambda: 5.0)
    for cause in ("pings", "handshake failed: one reason", "handshake failed: another", "pings", "slow_body"):
        faults(cause)
    rows = SeriesReader(schema, region, serving=lambda _: True).rows()
    counted = {labels[0]: values.counters[0] for labels, values in rows.items()}
    assert counted == {"pings": 2, "handshake_failed": 2, "slow_body": 1}
    assert said == ["peers' faults: 1; the last: pings"]


def test_there_is_room_for_every_cause() -> None:
    assert len(CAUSES) + 2 < ABUSE.blocks
