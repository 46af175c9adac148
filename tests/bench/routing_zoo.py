"""The policies of the routing benchmark, by name.

Configurations run the real decision code (`routing_policies`), published formulas a common ledger (`routing_ledger`). `LINE` are those
that run without being asked for; the others answer questions about one part of the picker, most of them on one kind of traffic.

"default": the learned latency model. "token weights": constants tuned on the model `shared`. "field's weights" get the load of
the last scrape, as the picker that they come from; "field's, own load" get this picker's, which includes requests in flight.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from epp.config.load import DEFAULT_TEXT
from tests.bench.routing_fleet import WORKERS, Fleet, Policy
from tests.bench.routing_formulas import FORMULAS
from tests.bench.routing_ledger import by_formula
from tests.bench.routing_policies import Picked
from tests.bench.routing_replicas import Replicas
from tests.bench.routing_simple import Informed, MostHits, Oracle, Random, RoundRobin

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
SHIPPED = Path(__file__).parents[2] / "deploy/config"
TOKENS_TEXT = (SHIPPED / "token-load.yaml").read_text()
RENDEZVOUS_TEXT = (SHIPPED / "replicas.yaml").read_text()
PRECISE = """\
- {type: token-producer}
- {type: precise-prefix-cache-producer, parameters: {speculativeIndexing: true}}
"""
PRECISE_TEXT = TOKENS_TEXT.replace("plugins:\n", f"plugins:\n{PRECISE}", 1)
PRECISE_FIELD_TEXT = FIELD_TEXT.replace("plugins:\n", f"plugins:\n{PRECISE}", 1)


def configured(text: str, streamed: float = 1.0, workers: int = WORKERS) -> Callable[[Fleet, int], Policy]:
    """Returns a function that makes the policy with the pipeline of this configuration. `streamed`: the share of streamed answers."""
    return lambda fleet, seed: Picked(
        text, seed, workers=workers, cache_blocks=fleet.kv_blocks, streamed=streamed, servers=len(fleet.servers)
    )


ORACLE = "oracle"
LINE: Policies = {
    ORACLE: lambda fleet, _: Oracle(fleet),
    "default": configured(DEFAULT_TEXT),
    "token weights": configured(TOKENS_TEXT),
    "field's weights": lambda fleet, seed: Picked(
        FIELD_TEXT, seed, scraped_only=True, cache_blocks=fleet.kv_blocks, servers=len(fleet.servers)
    ),
    "field's, own load": configured(FIELD_TEXT),
    "round-robin": lambda fleet, _: RoundRobin(len(fleet.servers)),
    "random": lambda fleet, seed: Random(seed, len(fleet.servers)),
    **{name: by_formula(formula) for name, formula in FORMULAS.items()},
}
FURTHER: Policies = {
    "default, unlimited index": lambda _, seed: Picked(DEFAULT_TEXT, seed),
    "token weights, precise": lambda _, seed: Picked(PRECISE_TEXT, seed, held=True),
    "field's, precise": lambda _, seed: Picked(PRECISE_FIELD_TEXT, seed, held=True),
    "token weights, 3 replicas": lambda _, seed: Replicas(TOKENS_TEXT, seed),
    "rendezvous, 3 replicas": lambda _, seed: Replicas(RENDEZVOUS_TEXT, seed),
    "default, not streamed": configured(DEFAULT_TEXT, 0.0),
    "default, half streamed": configured(DEFAULT_TEXT, 0.5),
    "token weights, not streamed": configured(TOKENS_TEXT, 0.0),
    "token weights, half streamed": configured(TOKENS_TEXT, 0.5),
    "rendezvous": configured(RENDEZVOUS_TEXT),
    "most hits": lambda fleet, _: MostHits(fleet),
    "informed": lambda fleet, seed: Informed(fleet, seed),
    "default, exact index": lambda _, seed: Picked(DEFAULT_TEXT, seed, workers=1, exact=True),
}
POLICIES: Policies = {**LINE, **FURTHER}
