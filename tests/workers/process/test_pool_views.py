"""Several pools in one instance: the memory has places for the names of all configurations, and each pool sees its own part."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from epp.config.load import load
from epp.metrics.flow_control import FLOW_GROUPS, FLOW_REQUESTS
from epp.metrics.request_series import ABUSE, GROUPS, REQUEST, REQUEST_FIGURES
from epp.plugins.producers.precise_prefix import kv_settings
from epp.request.pool_choice import UNDECIDED, PoolChoice
from loadtest.demo.ports import free_ports
from shm import observe
from shm.documents import DocumentReader, DocumentWriter
from tests.workers.instances import made, options, removed
from workers.process import StartError, pool_views
from workers.process.generations import Given
from workers.process.instance import Instance
from workers.process.layout import POOL_BANDS_MIN
from workers.process.places import DEFAULT, Places, Pool
from workers.process.pool_views import assigned, assigned_view, create_places, present, tell_assigned
from workers.shared.documents import Placed, PoolNames, assigned_of, encode

LORA = """
plugins: [{type: lora-affinity-scorer}, {type: max-score-picker}]
schedulingProfiles: [{name: default, plugins: [{pluginRef: lora-affinity-scorer}, {pluginRef: max-score-picker}]}]
"""
MANY_BANDS = f"""
featureGates: [flowControl]
flowControl: {{priorityBands: [{", ".join(f"{{priority: {number}}}" for number in range(1, 12))}]}}
"""


def pool(name: str, text: str | None = None, endpoints: int = 4) -> Pool:
    return Pool(name, Given(text, name, {}), load(text, name), "127.0.0.1:1", endpoints)


def found(name: str, text: str | None = None) -> Pool:
    """A configuration of pools that the picker finds while it runs."""
    return pool(name, text)._replace(endpoints="")


@contextlib.contextmanager
def created(folder: Path, *given: Pool) -> Iterator[Instance]:
    instance = pool_views.create(options(folder, max_endpoints=sum(each.max_endpoints for each in given)), given, PoolChoice([]), {})
    with removed(instance):
        yield instance


def test_each_pool_sees_its_configuration_and_its_columns_in_the_memory_of_all(tmp_path: Path) -> None:
    with created(tmp_path, pool("one"), pool("two", LORA)) as instance:
        one, two = instance.every
        assert [view.options.pool_name for view in instance.every] == ["one", "two"]
        assert one.layout.table is two.layout.table and one.layout.areas is two.layout.areas
        assert one.config is not two.config
        names = [{c.name for c in view.layout.table_columns if not c.name.startswith("retired ")} for view in instance.every]
        assert "active_models" in names[1] and "active_models" not in names[0]
        assert {each.plugin_name for each in two.layout.shown if each.plugin_name} < {each.plugin_name for each in instance.layout.shown}
        assert set(two.layout.timers.values()) <= set(range(len(instance.layout.families)))


def test_each_pool_has_flow_areas_and_a_latency_model_of_its_own(tmp_path: Path) -> None:
    with created(tmp_path, pool("one"), pool("two", MANY_BANDS), pool("three")) as instance:
        assert [view.memory.flow.schema.bands for view in instance.every] == [POOL_BANDS_MIN, 12, POOL_BANDS_MIN]
        for number, view in enumerate(instance.every):
            view.memory.flow.area(0).publish(0, number + 1, 0, 0.0)
            view.memory.areas.set_serving(1, True)
        assert [view.memory.flow.total(0) for view in instance.every] == [1, 2, 3]
        assert len(instance.layout.latency.capacities) == 3


def test_pools_with_the_same_configuration_share_what_follows_from_it(tmp_path: Path) -> None:
    first = pool("one")
    with created(tmp_path, first, first._replace(name="two")) as instance:
        one, two = instance.every
        assert one.layout is two.layout and one.sources is two.sources


def test_too_many_columns_of_all_pools_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.process.layout.COLUMNS_MAX", 3)
    with pytest.raises(StartError, match="a row holds 3"), created(tmp_path, pool("one"), pool("two", LORA)):
        pass


def test_metrics_with_labels_of_requests_have_the_pool_as_a_label_only_if_there_are_several(tmp_path: Path) -> None:
    with created(tmp_path, pool("one"), pool("two")) as instance:
        labels = {group.name: group.labels for group in instance.layout.shown_groups}
        assert labels[REQUEST.name] == (*REQUEST.labels, "pool") == instance.layout.series[REQUEST.name].labels
        assert "pool" not in labels[FLOW_REQUESTS.name]  # it has inference_pool
        assert "pool" not in labels[ABUSE.name]  # it belongs to none
    plain = {group.name: group.labels for group in (*GROUPS, *FLOW_GROUPS)}
    with made(tmp_path) as single:
        assert {group.name: group.labels for group in single.layout.groups} == plain
    with created(tmp_path, pool("one")) as single:
        assert {name: labels for name, labels in ((g.name, g.labels) for g in single.layout.groups) if name in plain} == plain
        assert single.pool_names == ()


def test_series_have_room_for_label_sets_of_all_pools(tmp_path: Path) -> None:
    with created(tmp_path, *(pool(f"p{number}", endpoints=1) for number in range(100))) as instance:
        assert instance.layout.series[REQUEST_FIGURES.name].blocks == 2 * 100


def test_other_processes_read_the_names_of_the_pools_in_the_file_of_the_instance(tmp_path: Path) -> None:
    with created(tmp_path, pool("one"), pool("two")) as instance:
        assert observe.find(instance.options.run_dir, name=instance.options.instance).pools == ("one", "two")


def test_inference_pools_take_places_and_leave_them_and_others_keep_what_they_see(tmp_path: Path) -> None:
    own = found("llama", LORA)
    places = Places({DEFAULT: found("default"), "llama": own}, free_ports(3), service="epp")
    with removed(create_places(options(tmp_path, max_endpoints=12, pool_given=True), places)) as instance:
        assert all(view.sources.asks_objects and not view.options.pool_name for view in instance.pools)
        llama = Placed("llama", places.ports[1])
        one = assigned(instance, {1: llama})
        two = assigned(one, {1: llama, 0: Placed("qwen", places.ports[0])})
        assert [view.options.pool_name for view in two.pools] == ["qwen", "llama", ""]
        assert two.pools[1] is one.pools[1] and two.pools[2] is instance.pools[2]
        assert two.pools[1].config is own.config and two.pools[0].config is not own.config
        assert [two.choice.of_stream(port, "") for port in places.ports] == [0, 1, UNDECIDED]
        assert assigned(two, {}).choice.of_stream(places.ports[0], "") == UNDECIDED


def test_all_processes_read_which_places_are_taken(tmp_path: Path) -> None:
    places = Places({DEFAULT: found("default")}, free_ports(2), names=("a",))
    with removed(create_places(options(tmp_path, max_endpoints=8, pool_given=True), places)) as instance:
        view = assigned_view(instance)
        assert view.names() is None
        writer = DocumentWriter(instance.layout.documents, instance.memory.documents)
        longest = {1: Placed("a" * 253, 65535), 0: Placed("b" * 253, 65534)}
        writer.write(assigned_of(2), encode(longest))
        assert view.names() == longest
        assert view.names() is None, "it is not new any more"
        assert [each.options.pool_name[0] for each in present(instance).pools] == ["b", "a"]


def test_the_names_of_pools_of_a_file_assign_no_places(tmp_path: Path) -> None:
    with created(tmp_path, pool("one"), pool("two")) as instance:
        tell_assigned(instance, {0: Placed("one", 0), 1: Placed("three", 0)})  # for commands and pages
        assert assigned_view(instance).names() is None


def test_commands_read_the_present_names_of_places_and_the_fixed_ones_of_other_pools(tmp_path: Path) -> None:
    def names(instance: Instance) -> PoolNames:
        seen = observe.find(instance.options.run_dir, name=instance.options.instance)
        return PoolNames(DocumentReader(instance.layout.documents, instance.memory.documents), seen.pools)

    places = Places({DEFAULT: found("default")}, free_ports(2), service="epp")
    with removed(create_places(options(tmp_path, max_endpoints=8, pool_given=True), places)) as instance:
        shown_now = names(instance)
        assert shown_now.several and list(shown_now.current()) == ["", ""]
        writer = DocumentWriter(instance.layout.documents, instance.memory.documents)
        for assigned_now, shown in (({1: Placed("llama", 1)}, ["", "llama"]), ({0: Placed("qwen", 2)}, ["qwen", ""])):
            writer.write(assigned_of(2), encode(assigned_now))
            assert list(shown_now.current()) == shown
    with created(tmp_path, pool("one"), pool("two")) as instance:
        assert list(names(instance).current()) == ["one", "two"]
    with made(tmp_path) as instance:
        assert not names(instance).several and list(names(instance).current()) == []


PRECISE = """
plugins:
- {type: token-producer, parameters: {modelName: m, vllm: {url: "http://127.0.0.1:1"}}}
- type: precise-prefix-cache-producer
  parameters: {kvEventsConfig: {podDiscoveryConfig: {socketPort: %d}}, indexerConfig: {kvBlockIndexConfig: {%s}}}
- {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}}
"""


def test_pools_with_a_precise_prefix_producer_share_an_index_with_room_for_the_largest(tmp_path: Path) -> None:
    small, large = (
        pool(name, PRECISE % (port, f"inMemoryConfig: {{size: {size}}}")) for name, port, size in (("a", 1, 1000), ("b", 2, 5000))
    )
    with created(tmp_path, pool("plain"), small, large) as instance:
        assert instance.layout.kv_settings is not None and instance.layout.kv_settings.blocks_max == 5000
        assert instance.memory.kv_events is not None and instance.layout.kv_events is not None
        assert [view.sources.kv_events.port if view.sources.kv_events is not None else 0 for view in instance.pools] == [0, 1, 2]
        kept = [instance.layout.kv_of(name) for name in ("plain", "a", "new")]
        assert [settings.port if settings is not None else 0 for settings in kept] == [0, 1, 0], "a pool that comes later has none"
    with created(tmp_path, pool("plain"), pool("other")) as instance:
        assert instance.layout.kv_settings is None and instance.memory.kv_events is None


def test_a_pool_that_is_found_needs_what_its_own_or_the_default_configuration_says(tmp_path: Path) -> None:
    text = PRECISE % (1, "")
    for configurations, expected in (
        ({DEFAULT: found("default", text), "own": found("own")}, [None, 1]),
        ({DEFAULT: found("default"), "own": found("own", text)}, [1, None]),
    ):
        places = Places(configurations, free_ports(2), service="epp")
        with removed(create_places(options(tmp_path, max_endpoints=8, pool_given=True), places)) as instance:
            kept = [instance.layout.kv_of(name) for name in ("own", "other")]
            assert [settings.port if settings is not None else None for settings in kept] == expected


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        ({"port": 9, "replay_port": 8, "block_tokens": 32, "topic": "other"}, ""),
        ({"tiers": (("gpu", 500),)}, "kvCacheBackendConfigs"),
        ({"bind": "tcp://*:5557"}, "zmqEndpoint"),
        ({"speculative_s": 1.0}, "speculativeTTL"),
    ],
)
def test_what_one_process_does_for_all_pools_must_be_equal(changed: dict[str, object], differs: str) -> None:
    settings = kv_settings(load(PRECISE % (1, ""), "a").pipeline.plugins.values())
    assert settings is not None
    assert pool_views.kv_events_differ(settings, msgspec.structs.replace(settings, **changed)) == differs
    bound = msgspec.structs.replace(settings, bind="tcp://*:5557")
    assert pool_views.kv_events_differ(bound, msgspec.structs.replace(bound, topic="other")) == "topicFilter"
