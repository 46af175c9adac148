"""The helpers of end-to-end tests: a picker starts although a port was taken after it was found free."""

import socket

import pytest

from tests.e2e import cluster as module
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import FAST


def test_a_picker_whose_port_was_taken_meanwhile_starts_with_others(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = cluster.fleet(1, *FAST)
    find = module.free_ports
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        found = iter([[find(1)[0], taken, find(1)[0]]])
        monkeypatch.setattr(module, "free_ports", lambda count: next(found, None) or find(count))
        picker = cluster.picker(fleet.file, workers=1)
    assert taken not in (picker.grpc, picker.health, picker.metrics)
    assert picker.page()
