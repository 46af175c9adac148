"""A real llama.cpp server behind a picker, with the engine as the documentation configures it."""

from tests.e2e.cluster import Cluster, eventually
from tests.engines.conftest import APPROXIMATE, Pool, Site
from tests.engines.conversations import converse, mean_error
from tests.engines.servers import llama_cpp

BLOCK = 64  # of the picker: llama.cpp reports none
SLOTS = 4  # as many chats stay in the cache
ENGINE = (
    APPROXIMATE
    + """
- type: core-metrics-extractor
  parameters:
    defaultEngine: llamacpp
    engineConfigs:
    - name: llamacpp
      queuedRequestsSpec: llamacpp:requests_deferred
      runningRequestsSpec: llamacpp:requests_processing
"""
)


def test_llama_cpp_is_read_predicted_and_found_healthy(cluster: Cluster) -> None:
    engine = llama_cpp(cluster)
    site = Site(cluster, Pool([engine], 0), ENGINE)
    assert [each["scraped"] for each in site.endpoints()] == [{"running_requests": 0, "waiting_requests": 0}]
    turns = converse(site.gateway, site.picker, chats=SLOTS, turns=5, systems=SLOTS)
    assert mean_error(turns) <= BLOCK, turns
    assert site.becomes_quiet(), site.endpoints()
    assert eventually(lambda: not site.findings()), site.findings()
