import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.replicas.live import HASHES, Replica
from workers.replicas import copying
from workers.replicas.copying import Slice, merge, read, slices
from workers.replicas.wire import NotUsable

X, Y, Z = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"


def replica(slots: dict[str, int]) -> Replica:
    made = Replica("unix:///none", "a", slots)
    made.exchange.parts.places.refresh()
    return made


def copied(source: Replica) -> list[bytes]:
    return list(slices(source.index, source.exchange.parts.places, 1, 100))


def taken(part: bytes, target: Replica, *, secret: int = 1) -> int:
    part_read = read(part)
    assert isinstance(part_read, Slice)
    return merge(part_read, target.index, target.exchange.parts.places, secret, 40)[0]


def test_a_copy_has_the_blocks_of_the_endpoints_that_both_know() -> None:
    source, target = replica({X: 0, Y: 1, Z: 2}), replica({Y: 7, X: 3})
    for address in (X, Y, Z):
        source.teach(address)
    parts = copied(source)
    assert sum(taken(part, target) for part in parts) == 2 * len(HASHES)
    assert (target.holds(X), target.holds(Y)) == (source.holds(X), source.holds(Y))
    assert sum(taken(part, target) for part in parts) == 0


def test_a_sparse_index_is_not_scanned_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    source = replica({X: 0})
    buckets = source.index.schema.buckets
    monkeypatch.setattr(copying, "SLICE_BUCKETS", buckets // 16)
    monkeypatch.setattr(copying, "LOOK_BUCKETS", buckets // 4)
    parts = copied(source)
    assert [bool(part) for part in parts] == [False, False, False, True], "only the last slice says something"
    source.teach(X)
    assert sum(map(len, copied(source))) > sum(map(len, parts))


def test_what_the_joining_replica_knows_already_stays() -> None:
    source, target = replica({X: 0, Y: 1}), replica({X: 3, Y: 4})
    source.teach(X)
    target.teach(X)
    target.teach(Y)
    before = target.index.size()
    assert sum(taken(part, target) for part in copied(source)) == 0
    assert target.index.size() == before


def test_a_copy_under_another_secret_is_refused() -> None:
    source = replica({X: 0})
    source.teach(X)
    with pytest.raises(NotUsable, match="copy"):
        taken(copied(source)[0], source, secret=2)


@given(st.data())
def test_a_damaged_copy_is_refused_or_adds_entries_of_known_endpoints(data: st.DataObject) -> None:
    source, target = replica({X: 0}), replica({X: 3})
    source.teach(X)
    part = bytearray(copied(source)[0])
    for _ in range(data.draw(st.integers(1, 4))):
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    try:
        taken(bytes(part), target)
    except NotUsable:
        return
    live = {0, 1, *target.owners.values()}
    owners = set(np.unique(np.frombuffer(target.index.copy(0, 1 << 20)[0], np.uint64) & np.uint64(0xFFFF)).tolist())
    assert owners <= live


def test_a_copy_with_deeply_nested_fields_is_refused() -> None:
    source = replica({X: 0})
    source.teach(X)
    part = bytearray(copied(source)[0])
    assert part[0] == 0x9B
    part[0] = 0x9C  # one more field
    with pytest.raises(NotUsable, match="malformed"):
        taken(bytes(part) + b"\x91" * 200_000 + b"\x01", replica({X: 3}))
