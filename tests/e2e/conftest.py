"""Starts one gateway for all end-to-end tests: 4 simulated servers, a picker with 4 workers, an Envoy with 2 threads."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.e2e.cluster import Cluster, Fleet, Picker

WORKERS = 4
SERVERS = 4
FAST = ("--prefill-us-per-token", "1", "--decode-ms", "10", "--kv-blocks", "200000")


class Gateway(NamedTuple):
    """A gateway, its picker and its servers."""

    port: int
    picker: Picker
    fleet: Fleet
    cluster: Cluster


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    with Cluster() as cluster:
        fleet = cluster.fleet(SERVERS, *FAST)
        picker = cluster.picker(fleet.file, workers=WORKERS)
        yield Gateway(cluster.envoy(picker), picker, fleet, cluster)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Yields a new cluster without processes for one test."""
    with Cluster() as cluster:
        yield cluster
