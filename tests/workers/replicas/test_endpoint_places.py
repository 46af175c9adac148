import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from compiled import kernels
from compiled.kernels.areas_reference import load_rows
from shm.documents import DocumentReader, DocumentSchema, DocumentWriter
from tests.shm.memory import region_for
from tests.workers.replicas.live import SLOTS, Replica
from tests.workers.replicas.messages import loads_of
from workers.replicas.endpoint_places import OwnLoad, Places, PoolPlace
from workers.replicas.wire import REQUESTS_MAX, TOKENS_MAX, pool_key
from workers.shared.documents import ENDPOINTS, EndpointRecord, EndpointsView, encode

ADDRESSES = [f"10.0.0.{number}:8000" for number in range(1, 6)]


def test_beyond_the_rows_of_a_message_the_most_loaded_endpoints_are_named() -> None:
    replica = Replica("unix:///none", "a", {address: slot for slot, address in enumerate(ADDRESSES)})
    known = replica.exchange.parts.places
    known.refresh()
    own = OwnLoad(replica.areas, known, rows_max=2)
    keys = {address: key for key, slot in known.slots.items() for address in ADDRESSES if replica.slots[address] == slot}
    for requests, address in enumerate(ADDRESSES):
        replica.serve(address, requests)
    for whole in (True, False):
        named = {key: requests for key, (requests, _) in loads_of(own.rows(whole=whole))}
        assert named == ({keys[ADDRESSES[4]]: 4, keys[ADDRESSES[3]]: 3} if whole else {})
    assert own.left_out == 2
    for address in ADDRESSES:
        replica.serve(address, 9)
    assert len(loads_of(own.rows(whole=False))) == 2
    for address in ADDRESSES[1:]:
        replica.serve(address, 0)
    assert len(loads_of(own.rows(whole=True))) == 1
    assert own.left_out == 0


COUNTS = st.integers(-3, 1 << 42)


@given(
    st.lists(st.lists(st.tuples(COUNTS, COUNTS), min_size=3, max_size=3), min_size=1, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
@example([[(0, 1), (0, 0), (0, 0)], [(0, 0), (0, 0), (0, 0)]], [False, True, False, False])
def test_rows_name_exactly_the_endpoints_whose_load_changed_with_and_without_the_kernel(
    steps: list[list[tuple[int, int]]], whole: list[bool]
) -> None:
    slots = {ADDRESSES[0]: 1, ADDRESSES[1]: 4, ADDRESSES[2]: SLOTS - 1}
    replica = Replica("unix:///none", "a", slots)
    known = replica.exchange.parts.places
    known.refresh()
    one, other = OwnLoad(replica.areas, known), OwnLoad(replica.areas, known)
    other.rows(whole=False)
    seen = dict.fromkeys(known.slots, (0, 0))
    for loads, all_of_them in zip(steps, whole, strict=False):
        for address, load in zip(slots, loads, strict=True):
            replica.serve(address, *load)
        told = one.rows(whole=all_of_them)
        workers, serving = replica.areas.of_workers()
        assert told == load_rows(workers, serving, other._words, known.key_array, other._said, all_of_them, REQUESTS_MAX, TOKENS_MAX)
        assert all(seen[key] != load for key, load in loads_of(told)) or all_of_them
        if all_of_them:  # a whole message names no endpoint without load
            seen = dict.fromkeys(known.slots, (0, 0))
        seen |= dict(loads_of(told))
        requests, tokens = replica.own.inflight, replica.own.tokens
        for key, slot in known.slots.items():
            assert seen[key] == (np.clip(requests[slot], 0, 1 << 20), np.clip(tokens[slot], 0, 1 << 40))


def test_the_kernel_reads_nothing_outside_the_areas() -> None:
    if not kernels.NATIVE:
        return
    areas, serving, keys = np.zeros((2, 8), np.int64), np.ones(2, np.int64), np.ones(1, np.uint64)
    said = np.zeros((1, 2), np.int64)
    for places in ([[0, 8]], [[-1, 0]], [[0, 1], [2, 3]]):
        with np.testing.assert_raises(ValueError):
            kernels.load_rows(areas, serving, np.array(places), keys, said, False, 9, 9)


def test_the_same_server_in_two_pools_has_two_keys_and_each_pool_its_own_slots() -> None:
    documents = DocumentSchema((4096, 4096))
    region = region_for(documents)
    records = [EndpointRecord("d", "x", "10.0.0.1", 80, {}, slot, 1, 9 + slot, pool=pool) for slot, pool in ((3, 0), (5, 1))]
    DocumentWriter(documents, region).write(ENDPOINTS, encode(records))

    def places(*pools: PoolPlace) -> Places:
        made = Places(EndpointsView(DocumentReader(documents, region)), lambda number: pools[number])
        made.refresh()
        return made

    one, two = PoolPlace("one", 7), PoolPlace("two", 7)
    known = places(one, two)
    assert {pool: list(slots.values()) for pool, slots in known.of_pool.items()} == {pool_key("one"): [3], pool_key("two"): [5]}
    other = places(two, one)
    assert known.slots.keys() == other.slots.keys(), "numbers of pools differ between replicas"
    assert [known.slots[key] for key in known.slots] == [3, 5] and [other.slots[key] for key in known.slots] == [5, 3]
    assert known.pages.slots.keys() == other.pages.slots.keys()
    assert known.pages.slots.keys() & places(PoolPlace("one", 8), two).pages.slots.keys() == {next(reversed(known.pages.slots))}


def test_pools_that_get_other_names_give_their_endpoints_other_keys() -> None:
    documents = DocumentSchema((4096, 4096))
    region = region_for(documents)
    DocumentWriter(documents, region).write(ENDPOINTS, encode([EndpointRecord("d", "x", "10.0.0.1", 80, {}, 3, 1, 9)]))
    name = "one"
    known = Places(EndpointsView(DocumentReader(documents, region)), lambda _number: PoolPlace(name, 7))
    assert known.refresh() and not known.refresh()
    before, name = set(known.slots), "two"
    known.renew()
    assert known.refresh() and set(known.slots).isdisjoint(before)
