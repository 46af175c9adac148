"""Requests that share a long document and come at the same time, in four workers of a real picker.

One server computes the document, and the others of these requests wait there.
"""

import asyncio
import random
import socket
import time
from collections.abc import Iterator
from statistics import median

import pytest
import yaml

from epp.config.load import API_VERSION
from loadtest.demo.stack import LOOPBACK, picker_config
from tests.e2e.cluster import ANSWER_S, COMPLETIONS, Answer, Cluster, Picker, ask, ask_all, completion, eventually

SERVERS, WORKERS, SIBLINGS, TURNS = 8, 4, 16, 5
WITHIN_S = 0.010
DOCUMENT_BYTES = 32_000  # 8,000 tokens: 0.8 s of prefill
CONFIG = f"""\
apiVersion: {API_VERSION}
kind: EndpointPickerConfig
plugins:
- type: learned-latency-producer
- type: learned-latency-scorer
schedulingProfiles:
- name: default
  plugins:
  - {{pluginRef: learned-latency-scorer, weight: 1}}
"""


class Site:
    """A picker with the learned latency scorer, in front of slow simulated servers."""

    def __init__(self, cluster: Cluster) -> None:
        fleet = cluster.fleet(SERVERS, "--prefill-us-per-token=100", "--decode-ms=2")
        config = picker_config(fleet.file, yaml.safe_load(CONFIG))
        self.picker: Picker = cluster.picker(fleet.file, workers=WORKERS, config_text=config)
        self.port = cluster.envoy(self.picker, threads=WORKERS)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Cluster() as cluster:
        yield Site(cluster)


def document(name: str) -> str:
    return random.Random(name).randbytes(DOCUMENT_BYTES // 2).hex()


def computed(answer: Answer) -> int:
    """Returns how many tokens the server has computed."""
    usage = answer.json()["usage"]
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def prefills_of(site: Site, name: str) -> int:
    """Sends siblings at the same time. Returns how many servers computed their document."""
    shared = document(name)
    bodies = [completion(f"{shared} question {n}", max_tokens=1) for n in range(SIBLINGS)]
    answers = asyncio.run(ask_all(site.port, COMPLETIONS, bodies, WITHIN_S))
    assert {answer.status for answer in answers} == {200}, [answer.body for answer in answers if answer.status != 200]
    return sum(computed(answer) > DOCUMENT_BYTES // 8 for answer in answers)


def test_siblings_cause_at_most_two_prefills_of_what_they_share(site: Site) -> None:
    ask_all_workers = [completion(f"warm {n}", max_tokens=1) for n in range(SIBLINGS)]
    asyncio.run(ask_all(site.port, COMPLETIONS, ask_all_workers))
    prefills = [prefills_of(site, f"siblings {turn}") for turn in range(TURNS)]
    print(f"prefills of the document, of {SIBLINGS} siblings: {prefills}")
    # A worker that a busy machine stops in the middle of a decision does not see its siblings. Without sight of them, all are 8.
    assert min(prefills) <= 2
    assert median(prefills) <= SERVERS / 2


def test_a_request_that_is_cancelled_before_its_first_token_leaves_nothing(site: Site) -> None:
    before = site.picker.counter("prefix_indexer_size")
    body = completion(document("cancelled"), max_tokens=1)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((LOOPBACK, site.port)) as client:
        client.sendall(head.encode() + body)
        assert eventually(lambda: site.picker.counter("prefix_indexer_size") > before), "the index learned nothing"
    left, gone = time.monotonic(), time.monotonic() + ANSWER_S
    while site.picker.counter("prefix_indexer_size") > before:
        assert time.monotonic() < gone, "the document stays in the index"
    print(f"nothing is left {1e3 * (time.monotonic() - left):.0f} ms after the client has gone")
    assert ask(site.port, COMPLETIONS, body).status == 200
