"""The next program has the same memory, where it lays it out in the same way. Where it does not, it makes it anew and carries over."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from epp.config.load import load
from epp.data import Column
from shm.documents import DocumentReader, DocumentWriter
from shm.prefix_reader import IndexReader
from shm.prefix_writer import IndexWriter
from shm.segment import SHM_DIRECTORY
from shm.table import TableReader, TableWriter
from tests.workers.instances import made
from tests.workers.process.handovers import QUEUE, bundle, handover
from workers.process import layout as layouts
from workers.process.errors import StartError
from workers.process.handover import Handover
from workers.process.instance import Instance
from workers.process.resumption import renewed, resumed

HASHES = np.array([0x1234 << 16 | 1, 0x5678 << 16], np.uint64)


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    with made(tmp_path, QUEUE) as created:
        created.begin(bundle(created, QUEUE))
        lane = created.memory.lanes.lane(1)
        lane.counters[3] = 5
        lane.inflight[0] = 2
        created.words.deadly[0] = 42
        index = IndexWriter(created.layout.index, created.memory.index)
        owner = index.new_owner()
        index.insert(HASHES, owner, 1)
        table = TableWriter(created.layout.table, created.memory.table)
        handle = table.claim(owner, lambda _: True)
        assert handle is not None
        values = [float(number + 1) for number in range(len(created.layout.table.columns))]
        table.write(handle, state=2, flags=0, updated_at=9.0, inflight_at_scrape=1.0, values=values, present=3)
        DocumentWriter(created.layout.documents, created.memory.documents).write(0, b"endpoints")
        yield created


def next_program(instance: Instance, sent: Handover) -> Instance:
    found = resumed(instance.options, sent, lambda options, _: options)
    for sock in found.sockets:
        sock.close()
    return found


def holds(instance: Instance) -> dict[str, object]:
    """What a program must not lose: an endpoint with its values and its entries in the index, a document, a counter."""
    layout, memory = instance.layout, instance.memory
    rows = TableReader(layout.table, memory.table).copy()
    document = DocumentReader(layout.documents, memory.documents).read(0)
    lane = memory.lanes.lane(1)
    return {
        "columns": {
            name: float(rows.column(index)[0])
            for index, name in enumerate(layout.table.columns)
            if rows.present[0] >> np.uint64(index) & np.uint64(1)
        },
        "row": [rows.generation.tolist(), rows.owner.tolist(), rows.state.tolist(), rows.updated_at.tolist()],
        "document": document and document[1],
        "counters": {name: lane.counters[at] for name, at in lane.schema.counter.items() if lane.counters[at]},
    }


def segments(instance: Instance) -> list[str]:
    return sorted(name for name in os.listdir(SHM_DIRECTORY) if name.startswith(instance.options.instance))


def entries(instance: Instance) -> int:
    return IndexWriter(instance.layout.index, instance.memory.index).size()


def test_the_next_program_has_the_same_memory_words_sockets_and_configuration(instance: Instance) -> None:
    instance.roll.started(2, 4711)
    sent = handover(instance)
    found = resumed(instance.options, sent, lambda options, _: options)
    assert renewed(found.layout, sent) == []
    found.memory.lanes.lane(1).add(3)
    assert instance.memory.lanes.lane(1).counters[3] == 6
    assert (found.roll.pid(2), found.words.deadly[0], found.number) == (4711, 42, 7)
    assert found.sockets.ports() == instance.sockets.ports()
    assert found.credentials.prefix_seed == instance.credentials.prefix_seed
    assert found.identity == instance.identity
    assert found.lock.info["segments"] == instance.lock.info["segments"]
    assert "queue-scorer" in found.config.pipeline.plugins
    for sock in found.sockets:
        sock.close()


def more_scalars(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layouts, "OWN_GAUGES", ("news", *layouts.OWN_GAUGES))


def more_columns(patch: pytest.MonkeyPatch) -> None:
    scraped = layouts.scraped_columns
    news = Column("a_new_column", float)
    patch.setattr(layouts, "scraped_columns", lambda pipeline: [news, *scraped(pipeline)])


def test_with_one_more_scalar_the_lanes_are_made_anew_and_the_rest_stays(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, sent, names = holds(instance), handover(instance), instance.lock.info["segments"]
    more_scalars(monkeypatch)
    found = next_program(instance, sent)
    assert renewed(found.layout, sent) == ["lanes"]
    assert holds(found) == before
    assert entries(found) == entries(instance) == len(HASHES)
    assert found.memory.lanes.lane(1).inflight[0] == 0, "those requests are counted in the old memory"
    assert instance.memory.lanes.lane(1).inflight[0] == 2, "which the earlier processes still use"
    (gone,) = set(names) - set(found.lock.info["segments"])
    assert not os.path.exists(SHM_DIRECTORY + gone)
    for name in set(found.lock.info["segments"]) - set(names):
        assert os.path.exists(SHM_DIRECTORY + name)
    child = found.generations.current()
    assert child.names == found.layout.names
    assert found.under(found.config, child).layout.described() == found.layout.described()
    assert instance.generations.current().names == instance.layout.names, "earlier processes go on with theirs"
    found.unlink()


def test_with_one_more_column_the_values_of_endpoints_are_found_by_name(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, sent = holds(instance), handover(instance)
    more_columns(monkeypatch)
    found = next_program(instance, sent)
    assert renewed(found.layout, sent) == ["state"]
    assert "a_new_column" in found.layout.table.columns
    assert holds(found) == before
    assert entries(found) == len(HASHES)
    assert TableWriter(found.layout.table, found.memory.table).claimed()[0].generation == 1
    found.unlink()


def test_an_index_of_another_layout_starts_empty_with_the_owners_of_the_endpoints(instance: Instance) -> None:
    sent = handover(instance)
    described = sent.layouts["index"]
    sent = msgspec.structs.replace(sent, layouts={**sent.layouts, "index": (described[0] + 1, described[1])})
    sent.layouts["index"][1]["index"]["hash"] += 1
    before = holds(instance)
    found = next_program(instance, sent)
    assert renewed(found.layout, sent) == ["index"]
    assert (holds(found), entries(found)) == (before, 0)
    writer = IndexWriter(found.layout.index, found.memory.index)
    (owner,) = writer.owners()
    writer.insert(HASHES, owner, 1)
    assert IndexReader(found.layout.index, found.memory.index).match(HASHES) == {owner: len(HASHES)}
    found.unlink()


def test_a_trial_makes_no_segment_and_ends_no_process(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = subprocess.Popen(["sleep", "1000"])
    instance.roll.started(0, sleeper.pid)
    sent, names = handover(instance, slot=3), segments(instance)
    more_scalars(monkeypatch)
    more_columns(monkeypatch)
    found = next_program(instance, sent)
    assert holds(found) == holds(instance)
    assert segments(instance) == names
    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()


def test_the_supervisor_ends_before_its_memory_is_carried_over(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = subprocess.Popen(["sleep", "1000"])
    instance.roll.started(0, sleeper.pid)
    sent = handover(instance)
    more_scalars(monkeypatch)
    found = next_program(instance, sent)
    assert sleeper.wait() == -9
    found.unlink()


def test_other_processes_are_refused(instance: Instance) -> None:
    sent = handover(instance)
    more = msgspec.structs.replace(sent, layouts={**sent.layouts, "news": (1, {})})
    with pytest.raises(StartError, match="other processes"):
        next_program(instance, more)


def test_an_earlier_configuration_finds_its_places_in_memory_that_was_made_anew(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = handover(instance)
    more_scalars(monkeypatch)
    found = next_program(instance, sent)
    text = "plugins: [{type: kv-cache-utilization-scorer}]\n"
    later = found.under(load(text, "test"), bundle(found, text))
    assert later.layout.needs() == found.layout.needs()
    assert later.layout.plans["lanes"].bytes == found.layout.plans["lanes"].bytes
    found.unlink()
