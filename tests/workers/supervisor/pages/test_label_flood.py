"""Whatever names clients invent, the metrics page stays small, and known names keep their series."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from epp.metrics import OTHER, Group
from epp.metrics.flow_control import FLOW_GROUPS
from epp.metrics.label_caps import FAIRNESS_ID, MODEL_LABELS, LabelCaps
from epp.metrics.page_size import weigher
from epp.metrics.request_series import GROUPS
from shm.series import LABEL_BYTES_MAX
from tests.workers.instances import made
from workers.process.instance import Instance
from workers.supervisor.pages.exposition import SeriesText

PAGE_BYTES_MAX = 8_000_000
CONFIG = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {type: disagg-profile-handler, name: splits, parameters: {deciders: {prefill: always}}}
- {type: always-disagg-pd-decider, name: always}
- {type: queue-scorer}
- {type: program-aware-fairness, name: fair}
schedulingProfiles:
- {name: decode, plugins: [{pluginRef: queue-scorer}]}
- {name: prefill, plugins: [{pluginRef: queue-scorer}]}
flowControl: {defaultPriorityBand: {fairnessPolicyRef: fair}}
"""
AREAS = 2
INVENTED = 600


class World:
    """The workers of an instance, which know all names, and the page of their series."""

    def __init__(self, instance: Instance) -> None:
        memory = instance.memory
        self.groups = instance.layout.shown_groups
        self.caps = [LabelCaps(10 * INVENTED) for _ in range(AREAS)]
        self.writers = {group.name: [memory.series_writer(group, area, self.caps[area]) for area in range(AREAS)] for group in self.groups}
        self.texts = [SeriesText(group, memory.series_reader(group), legacy=True) for group in self.groups]

    def count(self, group: Group, area: int, labels: tuple[str, ...], value: int = 1) -> None:
        """Counts in every metric of a group."""
        writer = self.writers[group.name][area]
        block = writer.block(labels)
        for at in (*writer.gauge_at.values(), *writer.counter_at.values()):
            writer.words[block + at] += value
        for index in range(len(group.histograms)):
            writer.observe(block, index, 0.5)

    def invented(self, model: str, fairness_id: str) -> None:
        """Counts a request with these names in all groups and areas."""
        for caps in self.caps:
            caps.served(model, model, fairness_id)
        for group in self.groups:
            labels = tuple(
                model if label in MODEL_LABELS else fairness_id if label in (FAIRNESS_ID, "program_id") else "0" for label in group.labels
            )
            for area in range(AREAS):
                self.count(group, area, labels)

    def page(self, *, openmetrics: bool = False) -> str:
        return "".join(part for text in self.texts for part in text.lines(text.totals(), openmetrics=openmetrics))

    def sweep(self) -> None:
        """Lets a while pass in which only what is counted before the second sweep is used."""
        for writers in self.writers.values():
            for writer in writers:
                for gauge in writer.gauge_at.values():
                    for block in writer._stored.values():
                        writer.words[block + gauge] = 0
                writer.sweep()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with made(tmp_path, CONFIG, allow_experimental=True) as instance:
        yield World(instance)


@pytest.mark.parametrize("longest", [False, True])
@pytest.mark.parametrize("what", ["models", "fairness ids", "both"])
def test_the_page_stays_below_8_mb_with_any_names(world: World, what: str, longest: bool) -> None:
    size = LABEL_BYTES_MAX if longest else 1
    for index in range(INVENTED):
        name = f"{index}".ljust(size, '"')
        world.invented(name if what != "fairness ids" else "m", name if what != "models" else "default-flow")
    for openmetrics in (False, True):
        assert len(world.page(openmetrics=openmetrics).encode()) < PAGE_BYTES_MAX


def test_known_names_keep_their_series_and_new_models_get_theirs(world: World) -> None:
    world.invented("llama", "acme")
    for index in range(INVENTED):
        world.invented("llama", f"invented-{index}")
    world.invented("llama", "acme")
    world.invented("new-model", "acme")
    page = world.page()
    requests = [line for line in page.splitlines() if line.startswith("llm_d_epp_request_total{")]
    labels = 'model_name="llama",target_model_name="llama",fairness_id="acme",priority="0"'
    assert f"llm_d_epp_request_total{{{labels}}} {2 * AREAS}.0" in requests
    assert any('model_name="new-model"' in line for line in requests)
    measured = [line for line in page.splitlines() if line.startswith("llm_d_epp_request_duration_seconds_count{")]
    assert any('model_name="new-model"' in line for line in measured)
    assert any('model_name="llama"' in line and f'fairness_id="{OTHER}"' in line for line in measured)


def test_invented_names_leave_the_page_when_new_names_need_their_room(world: World) -> None:
    for index in range(INVENTED):
        world.invented("llama", f"invented-{index}")
    assert "invented-3" in world.page()
    world.sweep()
    world.invented("llama", "acme")
    world.sweep()
    world.invented("llama", "acme")
    page = world.page()
    assert "invented" not in page
    assert 'model_name="llama",target_model_name="llama",fairness_id="acme"' in page


@pytest.mark.parametrize("group", [*GROUPS, *FLOW_GROUPS], ids=lambda group: group.name)
def test_a_tuple_takes_no_more_of_the_page_than_its_weight(world: World, group: Group) -> None:
    labels = tuple(f'{label}"\\' for label in group.labels)
    for value in labels:
        world.caps[0].served(value, value, value)
    world.count(group, 0, labels, value=1 << 50)
    (text,) = [each for each in world.texts if each._group is group]
    lines = [line for part in text.lines(text.totals(), openmetrics=False) for line in part.splitlines(True)]
    size = sum(len(line) for line in lines if not line.startswith("#"))
    assert size <= weigher(group)(labels) <= 1.5 * size
