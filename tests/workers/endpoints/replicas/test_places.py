import pytest

from tests.workers.endpoints.replicas.live import Replica
from workers.endpoints.replicas import places
from workers.endpoints.replicas.wire import rows

ADDRESSES = [f"10.0.0.{number}:8000" for number in range(1, 6)]


def test_beyond_the_rows_of_a_message_the_most_loaded_endpoints_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "ROWS_MAX", 2)
    replica = Replica("unix:///none", "a", {address: slot for slot, address in enumerate(ADDRESSES)})
    own, known = replica.exchange.parts.own, replica.exchange.parts.places
    known.refresh()
    keys = {
        address: key for key, slot in known.slots.items() for address in ADDRESSES if replica.slots[address] == slot
    }
    for requests, address in enumerate(ADDRESSES):
        replica.serve(address, requests)
    for whole in (True, False):
        named = {key: requests for key, requests, _ in rows(own.rows(whole=whole))}
        assert named == ({keys[ADDRESSES[4]]: 4, keys[ADDRESSES[3]]: 3} if whole else {})
    assert own.left_out == 2
    for address in ADDRESSES:
        replica.serve(address, 9)
    assert len(rows(own.rows(whole=False))) == 2
    for address in ADDRESSES[1:]:
        replica.serve(address, 0)
    assert len(rows(own.rows(whole=True))) == 1
    assert own.left_out == 0
