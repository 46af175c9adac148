"""Tests of bands and their places, of the document, and of the priority of a request."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.documents import DocumentReader, DocumentSchema, DocumentWriter
from shm.flow_areas import FlowAreas, FlowSchema
from shm.segment import Region
from tests.examples import examples
from tests.reports import Reports
from tests.shm.memory import region_for
from tests.shm.test_flow_areas import areas_of
from tests.workers.supervisor.folders import FolderWatch
from workers.host.yaml_files import DiscoveryError
from workers.shared.documents import OBJECTIVES
from workers.shared.objectives import REUSE_AFTER_S, BandPlaces, ObjectivesRecord, ObjectivesView, Priorities, encode

PLACES = 5


def places(empty: object = lambda _: True, static: tuple[int, ...] = (0, 3)) -> BandPlaces:
    return BandPlaces(static, PLACES, empty=empty, now=0.0)  # type: ignore[arg-type]


def test_fixed_bands_have_their_places_from_the_start() -> None:
    assert places().places == {0: 0, 3: 1}


def test_a_priority_gets_a_place_and_gives_it_back() -> None:
    bands = places()
    assert bands.want([7, 0], 1.0)
    assert bands.places == {0: 0, 3: 1, 7: 2}
    assert not bands.want([7], 2.0)
    assert bands.want([], 3.0)
    assert bands.places == {0: 0, 3: 1}


def test_a_priority_that_returns_soon_gets_its_old_place_even_if_requests_wait_there() -> None:
    bands = places(lambda place: place != 2)
    bands.want([], 0.0)
    bands = places()
    bands.want([7], 1.0)
    bands.want([], 2.0)
    bands.want([8, 7], 2.1)
    assert bands.places[7] == 2
    assert bands.places[8] == 3


def test_a_place_is_reused_only_after_a_time_and_only_if_no_request_waits_there() -> None:
    waits = {2}
    bands = places(lambda place: place not in waits)
    waits.clear()
    bands.want([5, 6, 7], 0.0)
    assert sorted(bands.places.values()) == [0, 1, 2, 3, 4]
    waits = {bands.places[7]}
    bands.want([5, 6], 10.0)
    bands.want([5, 6, 8], 10.1)
    assert bands.waiting == {8}
    bands.want([5, 6, 8], 10.0 + REUSE_AFTER_S)
    assert bands.waiting == {8}
    waits = set()
    assert bands.want([5, 6, 8], 10.0 + REUSE_AFTER_S)
    assert bands.waiting == frozenset()


@given(st.lists(st.tuples(st.sets(st.integers(-4, 4)), st.floats(0.0, 10.0), st.sets(st.integers(0, PLACES - 1))), max_size=20))
@examples(200)
def test_a_place_never_has_two_bands_and_never_changes_its_band_while_requests_wait_there(steps: list) -> None:
    waits: set[int] = set()
    bands = places(lambda place: place not in waits)
    owners = {place: priority for priority, place in bands.places.items()}
    now = 0.0
    for wanted, passed, waiting in steps:
        now += passed
        waits = set(waiting)
        bands.want(wanted, now)
        assert len(set(bands.places.values())) == len(bands.places)
        assert bands.places.keys() | bands.waiting >= wanted
        assert {0, 3} <= bands.places.keys()
        for priority, place in bands.places.items():
            assert owners.get(place, priority) == priority or place not in waits
            owners[place] = priority


class Documents:
    def __init__(self) -> None:
        schema = DocumentSchema((100, 100, 4000, 4000))
        region: Region = region_for(schema)
        self.writer, self.reader = DocumentWriter(schema, region), DocumentReader(schema, region)

    def watch(self, folder: Path | None, reports: Reports, flow: FlowAreas | None = None, now: float = 0.0) -> FolderWatch:
        directory = str(folder) if folder is not None else ""
        return FolderWatch(directory, self.reader, self.writer, (0,), flow, report=reports, now=lambda: now)


def flow_areas(bands: int = 3) -> FlowAreas:
    schema = FlowSchema(bands, 2)
    return FlowAreas(schema, region_for(schema), areas_of(2))


def objective(name: str, priority: int) -> str:
    return f"{{apiVersion: llm-d.ai/v1alpha2, kind: InferenceObjective, metadata: {{name: {name}}}, spec: {{priority: {priority}}}}}"


def test_workers_see_the_objectives_of_the_directory(tmp_path: Path) -> None:
    documents, reports = Documents(), Reports()
    (tmp_path / "a.yaml").write_text(objective("a", 4))
    view = ObjectivesView(documents.reader, (0,))
    assert view.priority("a") is None
    assert view.content.places == {0: 0}
    watch = documents.watch(tmp_path, reports, flow_areas())
    watch.start(successor=False)
    assert view.priority("a") == 4
    assert view.content.places == {0: 0, 4: 1}
    version = documents.reader.version(OBJECTIVES)
    watch.look()
    assert documents.reader.version(OBJECTIVES) == version
    (tmp_path / "a.yaml").write_text(objective("a", -4))
    watch.look()
    assert view.look()
    assert not view.look()
    assert view.priority("a") == -4


def test_a_bad_file_stops_the_first_start_but_not_a_successor(tmp_path: Path) -> None:
    documents, reports = Documents(), Reports()
    (tmp_path / "a.yaml").write_text(objective("a", 4))
    documents.watch(tmp_path, reports, flow_areas()).start(successor=False)
    before = documents.reader.read(OBJECTIVES)
    (tmp_path / "a.yaml").write_text("{")
    with pytest.raises(DiscoveryError, match=r"a\.yaml:2"):
        documents.watch(tmp_path, reports, flow_areas()).start(successor=False)
    documents.watch(tmp_path, reports, flow_areas()).start(successor=True)
    after = documents.reader.read(OBJECTIVES)
    assert before is not None
    assert after is not None
    assert ObjectivesView(documents.reader, (0,)).look()
    assert "neither YAML nor JSON" in reports[0]


def test_a_successor_keeps_the_assigned_places(tmp_path: Path) -> None:
    documents, reports = Documents(), Reports()
    (tmp_path / "a.yaml").write_text(objective("a", 4))
    (tmp_path / "b.yaml").write_text(objective("b", 5))
    first = documents.watch(tmp_path, reports, flow_areas())
    first.start(successor=False)
    (tmp_path / "b.yaml").unlink()
    view = ObjectivesView(documents.reader, (0,))
    view.look()
    place = view.content.places[4]
    documents.watch(tmp_path, reports, flow_areas()).start(successor=True)
    view.look()
    assert view.content.places == {0: 0, 4: place}


def test_priorities_without_a_place_are_reported_and_have_no_band(tmp_path: Path) -> None:
    documents, reports = Documents(), Reports()
    for priority in range(1, 5):
        (tmp_path / f"{priority}.yaml").write_text(objective(f"p{priority}", priority))
    watch = documents.watch(tmp_path, reports, flow_areas(3))
    watch.start(successor=False)
    watch.look()
    view = ObjectivesView(documents.reader, (0,))
    view.look()
    assert view.content.places.keys() == {0, 4, 3}
    assert view.priority("p1") == 1
    assert len(reports) == 1
    assert "wait in band 0 until a place of a band is free count=2 priorities=[2, 1] reason=all 3 places" in reports[0]


def test_a_report_names_some_of_many_priorities_without_a_place_and_is_not_repeated_at_each_change(tmp_path: Path) -> None:
    documents, reports = Documents(), Reports()
    path = tmp_path / "all.yaml"
    path.write_text("\n---\n".join(objective(f"p{n}", n) for n in range(1, 21)))
    watch = documents.watch(tmp_path, reports, flow_areas(3))
    watch.start(successor=False)
    for last in range(21, 25):
        path.write_text("\n---\n".join(objective(f"p{n}", n) for n in range(1, last + 1)))
        watch.look()
    (report,) = reports
    assert " count=18 priorities=[18, 17, 16, 15, 14, 13, 12, 11] " in report


def test_if_objectives_exceed_the_documents_capacity_workers_keep_the_last_ones(tmp_path: Path) -> None:
    documents, reports = Documents(), Reports()
    (tmp_path / "a.yaml").write_text("\n---\n".join(objective(f"a{n}-{'x' * 60}", n) for n in range(100)))
    documents.watch(tmp_path, reports).start(successor=False)
    assert "workers keep the last document document=objectives reason=document" in reports[0]


def test_without_flow_control_objectives_have_no_bands(tmp_path: Path) -> None:
    documents = Documents()
    (tmp_path / "a.yaml").write_text(objective("a", -4))
    documents.watch(tmp_path, []).start(successor=False)
    view = ObjectivesView(documents.reader, ())
    assert view.priority("a") == -4


def test_a_request_without_a_known_objective_has_priority_0_and_is_counted() -> None:
    documents, unknown = Documents(), list[int]()
    documents.writer.write(OBJECTIVES, encode(ObjectivesRecord({"a": 9}, {})))
    priorities = Priorities(ObjectivesView(documents.reader, ()), lambda: unknown.append(1))
    assert priorities.of("a") == 9
    assert unknown == []
    assert priorities.of("b") == 0
    assert len(unknown) == 1
