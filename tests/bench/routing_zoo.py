"""The policies of the routing benchmark, by name.

Configurations run the real decision code (`routing_policies`), published formulas a common ledger (`routing_ledger`). `LINE` are those
that run without being asked for; the others answer questions about one part of the picker, most of them on one kind of traffic.

"learned": the learned latency model alone. "token weights": constants tuned on the model `shared`. "field's weights" get the load of
the last scrape, as the picker that they come from; "field's, own load" get this picker's, which includes requests in flight.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from epp.config.load import DEFAULT_TEXT
from tests.bench.routing_fleet import Fleet, Policy
from tests.bench.routing_formulas import FORMULAS
from tests.bench.routing_ledger import by_formula
from tests.bench.routing_policies import Picked
from tests.bench.routing_replicas import Replicas
from tests.bench.routing_simple import MostHits, Oracle, Random, RoundRobin

Policies = Mapping[str, Callable[[Fleet, int], Policy]]

FIELD_TEXT = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
"""
TOKENS_TEXT = """\
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- {type: token-load-scorer, parameters: {queueThresholdTokens: 262144}}
- type: queue-scorer
- type: running-requests-size-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: token-load-scorer, weight: 256}
  - {pluginRef: queue-scorer, weight: 1}
  - {pluginRef: running-requests-size-scorer, weight: 1}
  - {pluginRef: kv-cache-utilization-scorer, weight: 1}
  - {pluginRef: prefix-cache-scorer, weight: 1}
"""
LEARNED_TEXT = """\
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: learned-latency-producer
- type: learned-latency-scorer
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: learned-latency-scorer, weight: 1}
"""
PRECISE = """\
- {type: token-producer}
- {type: precise-prefix-cache-producer, parameters: {speculativeIndexing: true}}
"""
PRECISE_TEXT = DEFAULT_TEXT.replace("plugins:\n", f"plugins:\n{PRECISE}", 1)
PRECISE_FIELD_TEXT = FIELD_TEXT.replace("plugins:\n", f"plugins:\n{PRECISE}", 1)
RENDEZVOUS_TEXT = (Path(__file__).parents[2] / "deploy/config/replicas.yaml").read_text()


def configured(text: str) -> Callable[[Fleet, int], Policy]:
    """Returns a function that makes the policy with the pipeline of this configuration."""
    return lambda fleet, seed: Picked(text, seed, cache_blocks=fleet.kv_blocks)


ORACLE = "oracle"
LINE: Policies = {
    ORACLE: lambda fleet, _: Oracle(fleet),
    "default": configured(DEFAULT_TEXT),
    "learned": configured(LEARNED_TEXT),
    "token weights": configured(TOKENS_TEXT),
    "field's weights": lambda fleet, seed: Picked(FIELD_TEXT, seed, scraped_only=True, cache_blocks=fleet.kv_blocks),
    "field's, own load": configured(FIELD_TEXT),
    "round-robin": lambda _, seed: RoundRobin(),
    "random": lambda _, seed: Random(seed),
    **{name: by_formula(formula) for name, formula in FORMULAS.items()},
}
FURTHER: Policies = {
    "default, unlimited index": lambda _, seed: Picked(DEFAULT_TEXT, seed),
    "default, precise": lambda _, seed: Picked(PRECISE_TEXT, seed, held=True),
    "field's, precise": lambda _, seed: Picked(PRECISE_FIELD_TEXT, seed, held=True),
    "default, 3 replicas": lambda _, seed: Replicas(DEFAULT_TEXT, seed),
    "rendezvous, 3 replicas": lambda _, seed: Replicas(RENDEZVOUS_TEXT, seed),
    "rendezvous": configured(RENDEZVOUS_TEXT),
    "most hits": lambda fleet, _: MostHits(fleet),
    "default, exact index": lambda _, seed: Picked(DEFAULT_TEXT, seed, workers=1, exact=True),
}
POLICIES: Policies = {**LINE, **FURTHER}
