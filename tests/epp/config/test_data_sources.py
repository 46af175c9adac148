"""Data sources and extractors of a configuration: which are added, which fit each other, and which are refused."""

import re

import pytest

from tests.epp.config.loading import errors, ok
from tests.epp.config_plugins import HERE


def test_a_listed_data_source_keeps_its_parameters_and_is_not_added_again() -> None:
    text = """\
        plugins:
        - {type: metrics-data-source, name: mine, parameters: {path: /m}}
        - {type: core-metrics-extractor}
        - {type: queue-scorer}
        dataLayer: {sources: [{pluginRef: mine, extractors: [{pluginRef: core-metrics-extractor}]}]}
        """
    assert ok(text).sources[0].source.name == "mine"


def test_the_default_data_source_is_added_unless_it_is_switched_off() -> None:
    assert ok("plugins: [{type: queue-scorer}]").sources[0].source.name == "metrics-data-source"
    assert ok("plugins: [{type: random-picker}]\ndataLayer: {injectDefaults: false}").sources == ()
    text = """\
        plugins: [{type: metrics-data-source, name: s}, {type: core-metrics-extractor, name: e}]
        dataLayer: {injectDefaults: false, sources: [{pluginRef: s, extractors: [{pluginRef: e}]}]}
        """
    extractor = ok(text).sources[0].extractors[0]
    assert extractor is not None
    assert extractor.name == "e"


CURRENT = """\
    apiVersion: llm-d.ai/v1
    kind: EndpointPickerConfig
    plugins:
    - {type: random-picker}
    - {type: file-discovery, name: d, parameters: {path: e.yaml}}
    dataLayer:
      injectDefaults: false
      discovery:
        endpoints: {pluginRef: d}
        peers: {pluginRef: p}
      crossReplica: {syncInterval: 1s, publishTimeout: 2s}
    """


def test_both_forms_of_the_data_layer_mean_the_same() -> None:
    older = """\
        apiVersion: llm-d.ai/v1alpha1
        kind: EndpointPickerConfig
        plugins:
        - {type: random-picker}
        - {type: file-discovery, name: d, parameters: {path: e.yaml}}
        dataLayer:
          injectDefaults: false
          discovery: {pluginRef: d}
          peerDiscovery: {pluginRef: p}
          crossReplicaSyncInterval: 1s
          crossReplicaPublishTimeout: 2s
        """
    current = ok(CURRENT)
    assert current.discovery is not None
    assert current.as_yaml() == ok(older).as_yaml()
    assert {warning.rule for warning in current.warnings} == {"no-effect"}
    both = older.replace("discovery: {pluginRef: d}", "discovery: {pluginRef: x, endpoints: {pluginRef: d}}")
    assert ok(both).as_yaml() == current.as_yaml()


def test_a_data_source_that_is_unknown_is_the_only_error() -> None:
    text = "plugins: [{type: queue-scorer}]\ndataLayer: {sources: [{pluginRef: metrics-data-source, extractors: []}]}"
    assert [re.findall(r"error\[(.*?)\]", line) for line in errors(text)] == [["unknown-ref"]]


def test_each_data_source_has_one_extractor_of_its_own() -> None:
    plugins = f"plugins: [{{type: core-metrics-extractor}}, {{type: '{HERE}:OtherWaiting', name: own}}, "
    plugins += f"{{type: '{HERE}:OtherSource', name: s}}, {{type: metrics-data-source}}]\n"
    both = "dataLayer: {sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}, {pluginRef: own}]}]}"
    assert any("has 2 extractors; one is supported" in e for e in errors(plugins + both))
    two = "dataLayer: {sources: [{pluginRef: s, extractors: [{pluginRef: own}]}, "
    two += "{pluginRef: metrics-data-source, extractors: [{pluginRef: own}]}]}"
    found = errors(plugins + two)
    assert any("extractor 'own' reads the pages of data source 's' and of data source 'metrics-data-source'" in e for e in found)
    same = "dataLayer: {sources: [{pluginRef: s, extractors: [{pluginRef: own}, {pluginRef: own}]}, {pluginRef: s}]}"
    found = errors(plugins + same)
    assert any("two extractors of type" in e for e in found)
    assert any("lists 's' twice" in e for e in found)


def test_a_data_layer_that_inherits_from_no_built_in_class_is_refused() -> None:
    own = f"plugins: [{{type: '{HERE}:OtherSource', name: s}}, {{type: '{HERE}:OtherWaiting', name: e}}]\n"
    found = errors(own + "dataLayer: {injectDefaults: false, sources: [{pluginRef: s, extractors: [{pluginRef: e}]}]}")
    assert any("plugin 's' is a data source that inherits from no built-in class; this version cannot use it" in e for e in found)
    assert any("plugin 'e' is an extractor that inherits from no built-in class" in e for e in found)
    heir = f"plugins: [{{type: '{HERE}:HeirOfCoreMetrics', name: e}}, {{type: metrics-data-source}}]\n"
    assert ok(heir + "dataLayer: {sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: e}]}]}")


SOURCES = """
plugins:
- {type: metrics-data-source}
- {type: core-metrics-extractor}
- {type: models-data-source}
- {type: models-data-extractor}
- {type: dcgm-data-source}
- {type: dcgm-extractor}
- {type: topology-extractor}
dataLayer:
  sources:
  - {pluginRef: %s, extractors: [{pluginRef: %s}]}
  - {pluginRef: %s, extractors: [{pluginRef: %s}]}
"""
MODELS_THERE = ("models-data-source", "models-data-extractor")
CORE_THERE = ("metrics-data-source", "core-metrics-extractor")


def test_several_data_sources_are_accepted_and_the_default_one_is_added_to_them() -> None:
    config = ok(SOURCES % ("dcgm-data-source", "dcgm-extractor", *MODELS_THERE), allow_experimental=True)
    names = [scraped.source.name for scraped in config.sources]
    assert names == ["dcgm-data-source", "models-data-source", "metrics-data-source"]


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (("metrics-data-source", "models-data-extractor"), ("models-data-source", "core-metrics-extractor"),
         "reads pages of models, but 'metrics-data-source' brings pages of metrics"),
        (("models-data-source", "core-metrics-extractor"), ("metrics-data-source", "dcgm-extractor"),
         "reads pages of metrics, but 'models-data-source' brings pages of models"),
        (CORE_THERE, ("dcgm-data-source", "topology-extractor"),
         "extractor 'topology-extractor' reads no pages, so it belongs to no data source"),
    ],
)  # fmt: skip
def test_source_and_extractor_must_fit(first: tuple[str, str], second: tuple[str, str], why: str) -> None:
    assert any(why in error for error in errors(SOURCES % (*first, *second), allow_experimental=True))


def test_more_sources_than_are_scraped_are_refused() -> None:
    listed = [f"{{type: models-data-source, name: s{n}}}, {{type: models-data-extractor, name: e{n}}}" for n in range(9)]
    sources = [f"{{pluginRef: s{n}, extractors: [{{pluginRef: e{n}}}]}}" for n in range(9)]
    text = f"plugins: [{', '.join(listed)}]\ndataLayer: {{injectDefaults: false, sources: [{', '.join(sources)}]}}"
    assert any("9 data sources are configured; at most 8 are scraped" in error for error in errors(text))


CLUSTERS = """
plugins:
- {type: multicluster-metrics-data-source}
- {type: multicluster-metrics-extractor}
- {type: multicluster-queue-scorer}
%s
dataLayer:
  sources: [{pluginRef: multicluster-metrics-data-source, extractors: [{pluginRef: multicluster-metrics-extractor}]}]
"""


@pytest.mark.parametrize(
    ("more", "sources"),
    [
        ("", ["multicluster-metrics-data-source"]),
        ("- {type: queue-scorer}", ["multicluster-metrics-data-source", "metrics-data-source"]),
        (
            "- {type: multicluster-approx-prefix-cache-producer, name: p}\n"
            "- {type: multicluster-prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: p}}",
            ["multicluster-metrics-data-source"],
        ),
    ],
)
def test_gateways_of_clusters_are_asked_for_engine_metrics_only_if_a_plugin_reads_them(more: str, sources: list[str]) -> None:
    config = ok(CLUSTERS % more, allow_experimental=True)
    assert [scraped.source.name for scraped in config.sources] == sources
