"""How a picker starts, ends and refuses to start, as a process."""

import os
import signal
from pathlib import Path

from tests.e2e.cluster import Cluster, Picker, run, serve, write_endpoints
from workers.demo.children import free_ports
from workers.demo.stack import picker_config

END_S = 15.0


def residue(picker: Picker) -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").glob(f"{picker.instance}-*"))


def some_endpoints(cluster: Cluster) -> Path:
    return cluster.fleet(1).file


def test_sigterm_ends_with_exit_code_0_and_leaves_nothing(cluster: Cluster) -> None:
    picker = cluster.picker(some_endpoints(cluster), workers=2)
    assert residue(picker)
    picker.child.signal(signal.SIGTERM)
    assert picker.child.process.wait(END_S) == 0, picker.child.tail()
    cluster.forget(picker.child)
    assert residue(picker) == []
    assert list((cluster.directory / "run").iterdir()) == []


def test_ctrl_c_in_the_whole_group_ends_it_the_same_way(cluster: Cluster) -> None:
    picker = cluster.picker(some_endpoints(cluster), workers=2)
    os.killpg(picker.child.pid, signal.SIGINT)
    assert picker.child.process.wait(END_S) == 0, picker.child.tail()
    cluster.forget(picker.child)
    assert residue(picker) == []


def test_what_a_killed_picker_left_is_removed_at_the_next_start(cluster: Cluster) -> None:
    endpoints = some_endpoints(cluster)
    killed = cluster.picker(endpoints, workers=2)
    killed.child.kill_group()
    killed.child.process.wait(END_S)
    cluster.forget(killed.child)
    assert residue(killed)
    successor = cluster.picker(endpoints, workers=1)
    assert residue(killed) == []
    assert residue(successor)


def test_a_port_in_use_is_an_error_that_names_it(cluster: Cluster) -> None:
    first = cluster.picker(some_endpoints(cluster), workers=1)
    config = cluster.directory / "second.yaml"
    config.write_text(picker_config(write_endpoints(cluster.directory / "second-endpoints.yaml", [("127.0.0.1", 1)])))
    health, metrics = free_ports(2)
    second = run(serve(config, first.grpc, health, metrics, 1, cluster.directory / "other-run"))
    assert second.returncode == 1
    assert f"port {first.grpc} (--grpc-port) is in use" in second.stderr
    assert first.ready()


def test_an_unknown_field_is_refused_with_its_place(cluster: Cluster) -> None:
    config = cluster.directory / "wrong.yaml"
    config.write_text("plugins:\n- type: queue-scorer\nschedulingProfile: []\n")
    grpc, health, metrics = free_ports(3)
    done = run(serve(config, grpc, health, metrics, 1, cluster.directory / "run"))
    assert done.returncode == 78
    assert "wrong.yaml:3" in done.stderr
    assert "schedulingProfiles" in done.stderr
