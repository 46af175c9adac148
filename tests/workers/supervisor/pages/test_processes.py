"""What the metrics page shows of the picker's processes."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.workers.instances import made
from tests.workers.supervisor.pages.test_metrics import World
from workers.host.proc import ProcessUse
from workers.process.children import EndCause
from workers.process.instance import Instance
from workers.process.layout import CERTIFICATE_SOON, CERTIFICATE_UNTIL
from workers.supervisor.pages.processes import ProcessFigures
from workers.supervisor.pages.sections import Sections

UNTIL = 1_800_000_000


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    with made(tmp_path) as instance:
        yield instance


def world(instance: Instance, uses: dict[int, ProcessUse]) -> World:
    instance.credentials = instance.credentials._replace(metrics=SimpleNamespace(valid_until=UNTIL + 7.0, soon_at=UNTIL - 3.0))
    figures = ProcessFigures(instance, uses.get, lambda: UNTIL - 5.0)
    return World(instance, sections=Sections(processes=figures))


def test_each_process_shows_its_memory_and_its_cpu_time(instance: Instance) -> None:
    instance.children.started(0, 50)
    instance.children.started(2, 52)
    parent = instance.parent_pid
    page = world(instance, {parent: ProcessUse(10, 0.5), 50: ProcessUse(20, 1.5), 52: ProcessUse(30, 2.5)})
    for process, memory, cpu in (("parent", 10, 0.5), ("supervisor", 20, 1.5), ("worker 1", 30, 2.5)):
        assert page.value("process_resident_memory_bytes", process=process) == memory
        assert page.value("process_cpu_seconds_total", process=process) == cpu
    assert page.value("process_cpu_seconds_total", process="worker 0") is None


def test_cpu_time_does_not_fall_while_a_child_ends_and_its_successor_adds_to_it(instance: Instance) -> None:
    instance.children.started(1, 50)
    uses = {50: ProcessUse(20, 1.5)}
    page = world(instance, uses)
    assert page.value("process_cpu_seconds_total", process="worker 0") == 1.5
    del uses[50]  # it was reaped, and the parent has not noted that yet
    assert page.value("process_cpu_seconds_total", process="worker 0") == 1.5
    assert page.value("process_resident_memory_bytes", process="worker 0") is None
    instance.children.ended(1, EndCause.SIGNAL, 1.75)
    assert page.value("process_cpu_seconds_total", process="worker 0") == 1.75
    instance.children.started(1, 51)
    uses[51] = ProcessUse(20, 0.25)
    assert page.value("process_cpu_seconds_total", process="worker 0") == 2.0


def test_ends_are_counted_by_process_and_cause(instance: Instance) -> None:
    instance.children.started(1, 50)
    instance.children.ended(1, EndCause.MEMORY, 0.0)
    instance.children.ended(0, EndCause.HUNG, 0.0)
    page = world(instance, {})
    assert page.value("process_exits_total", process="worker 0", cause="memory") == 1
    assert page.value("process_exits_total", process="worker 0", cause="hung") == 0
    assert page.value("process_exits_total", process="supervisor", cause="hung") == 1
    assert page.value("process_exits_total", process="worker 1", cause="hung") is None


def test_the_starts_of_the_supervisor_are_counted(instance: Instance) -> None:
    page = world(instance, {})
    for _ in range(2):
        instance.memory.areas.area(0).take_over()
    assert page.value("supervisor_starts_total") == 2


def test_the_earliest_end_of_the_certificates_of_serving_workers_is_shown(instance: Instance) -> None:
    areas = instance.memory.areas
    page = world(instance, {})
    place = areas.schema.scalar[CERTIFICATE_UNTIL]
    assert page.value("certificate_expiry_timestamp_seconds", port="ext_proc") is None
    for ordinal, until in ((1, UNTIL + 60), (2, UNTIL)):
        areas.area(ordinal).scalars[place] = until
        areas.area(ordinal).scalars[areas.schema.scalar[CERTIFICATE_SOON]] = until - 20
    areas.set_serving(1, True)
    assert page.value("certificate_expiry_timestamp_seconds", port="ext_proc") == UNTIL + 60
    assert page.value("certificate_expires_soon", port="ext_proc") == 0
    areas.set_serving(2, True)
    assert page.value("certificate_expiry_timestamp_seconds", port="ext_proc") == UNTIL
    assert page.value("certificate_expiry_timestamp_seconds", port="metrics") == UNTIL + 7
    assert [page.value("certificate_expires_soon", port=port) for port in ("ext_proc", "metrics")] == [1, 0]
