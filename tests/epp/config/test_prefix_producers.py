"""Which prefix producer a plugin reads, and which tier of the servers' caches a producer stands for."""

from epp.config.load import load
from epp.plugin import Plugin
from epp.prefix.match import APPROXIMATE, Capacity, CutsPrompts
from tests.cases import cases

CPU = "{type: approx-prefix-cache-producer, name: cpu, parameters: {autoTune: false, lruCapacityPerServer: 82000}}"
BY_CPU = "{type: prefix-cache-scorer, name: by-cpu, parameters: {prefixMatchInfoProducerName: cpu}}"
UNNAMED = "{type: prefix-cache-scorer, name: by-gpu}"
PRECISE = '{type: precise-prefix-cache-producer}\n- {type: token-producer, parameters: {modelName: m, vllm: {url: "http://h:1"}}}'


def loaded(*plugins: str) -> dict[str, Plugin]:
    text = "plugins:\n" + "".join(f"- {plugin}\n" for plugin in plugins)
    return dict(load(text, "c.yaml", allow_experimental=True).pipeline.plugins)


def read_by(plugin: Plugin) -> list[str]:
    prefix = "prefix_match/"
    return [key.name.removeprefix(prefix) for key in plugin.consumes if key.name.startswith(prefix)]


def tiers(plugins: dict[str, Plugin]) -> dict[str, tuple[int, Capacity]]:
    return {name: (p.tier, p.capacity) for name, p in plugins.items() if isinstance(p, CutsPrompts)}


def test_beside_a_producer_for_the_second_tier_an_unnamed_scorer_reads_the_default_one() -> None:
    """As in the guide for a CPU tier of the field: only the CPU tier's producer has a name."""
    plugins = loaded(CPU, UNNAMED, BY_CPU)
    assert read_by(plugins["by-gpu"]) == [APPROXIMATE]
    assert read_by(plugins["by-cpu"]) == ["cpu"]
    assert tiers(plugins) == {"cpu": (0, Capacity(False, 82_000)), APPROXIMATE: (1, Capacity(True, 31_250))}


def test_producers_of_equal_capacity_share_a_tier() -> None:
    other = "{type: approx-prefix-cache-producer, name: gpu, parameters: {maxPrefixTokensToMatch: 1024}}"
    reads = "{type: prefix-cache-scorer, name: two, parameters: {prefixMatchInfoProducerName: gpu}}"
    plugins = loaded(other, CPU, UNNAMED, BY_CPU, reads)
    assert {name: tier for name, (tier, _) in tiers(plugins).items()} == {"gpu": 0, "cpu": 1, APPROXIMATE: 0}


@cases(
    ("listed", "read"),
    [
        ((), APPROXIMATE),
        (("{type: approx-prefix-cache-producer}",), APPROXIMATE),
        (("{type: approx-prefix-cache-producer, name: mine}",), APPROXIMATE),
        ((PRECISE,), "precise-prefix-cache-producer"),
        ((PRECISE, CPU), APPROXIMATE),
        (("{type: multicluster-approx-prefix-cache-producer}",), "multicluster-approx-prefix-cache-producer"),
    ],
)
@cases("reader", ["prefix-cache-scorer", "no-hit-lru-scorer", "latency-scorer", "prefix-cache-affinity-filter"])
def test_a_plugin_that_names_no_producer_reads_the_default_one_or_the_only_one_of_another_type(
    listed: tuple[str, ...], read: str, reader: str
) -> None:
    plugins = loaded(*listed, f"{{type: {reader}, name: reader}}")
    assert read_by(plugins["reader"]) == [read]
    assert read in plugins
