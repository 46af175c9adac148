"""A profile of a worker that serves requests, over the metrics port."""

import threading
import urllib.error
import urllib.request
from http import HTTPStatus

import pytest

from loadtest.demo.stack import LOOPBACK
from tests.e2e.cluster import ANSWER_S, COMPLETIONS, Cluster, ask, completion, eventually
from tests.e2e.conftest import FAST, Gateway


def page(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{LOOPBACK}:{port}{path}", timeout=ANSWER_S) as answer:
        data: bytes = answer.read()
    return data


def test_a_profile_shows_where_a_busy_worker_spends_its_time_and_it_serves_on(cluster: Cluster) -> None:
    picker = cluster.picker(cluster.fleet(2, *FAST).file, workers=1)
    port = cluster.envoy(picker)
    enough = threading.Event()
    statuses: list[int] = []

    def load() -> None:
        while not enough.is_set():
            statuses.append(ask(port, COMPLETIONS, completion(f"{len(statuses)} " + "x " * 20_000, max_tokens=1)).status)

    client = threading.Thread(target=load)
    client.start()
    try:
        stacks: list[str] = []

        def profiled() -> bool:
            stacks.extend(page(picker.metrics, "/debug/profile?worker=0&seconds=1").decode().splitlines())
            return bool(stacks)

        assert eventually(profiled, ANSWER_S)
        assert all("workers.worker.main.run;asyncio.runners.Runner.run;" in stack for stack in stacks)
        assert page(picker.metrics, "/debug/pprof/profile?seconds=1")
    finally:
        enough.set()
        client.join()
    assert set(statuses) == {200}


def test_without_the_flag_there_is_no_page(gateway: Gateway) -> None:
    picker = gateway.cluster.picker(gateway.fleet.file, "--enable-pprof=false", workers=1)
    with pytest.raises(urllib.error.HTTPError) as refused:
        page(picker.metrics, "/debug/pprof/profile?seconds=1")
    refused.value.close()
    assert refused.value.code == HTTPStatus.NOT_FOUND
