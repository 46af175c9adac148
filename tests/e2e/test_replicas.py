"""Replicas and their store, as real processes: what they share, and what holds when one of them fails."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.demo.children import ChildFailed
from loadtest.demo.ports import free_ports
from tests.e2e.cluster import Cluster, Fleet, Picker, eventually
from tests.e2e.replica_site import PREFIX, Remote, know_each_other
from tests.faults import replicas as faults
from tests.faults.replica_world import Traffic, World
from tests.redis_server import RedisServer, needs_redis
from tests.workers.authority import Authority, write_pair

pytestmark = needs_redis

ACL = "user picker on >{password} ~{prefix}:1:* &{prefix}:1:* -@all +publish +subscribe +get +set +incr +incrby"
PASSWORD = "only-for-replicas"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World() as world:
        yield world


@pytest.mark.parametrize("name", [name for name in faults.FAULTS if name not in faults.LONG])
def test_no_request_fails_and_replicas_find_each_other_again_after_a(world: World, name: str) -> None:
    with Traffic(world.site.port) as traffic:
        faults.FAULTS[name](world, 0.2)
        world.recovered()
        assert eventually(lambda: traffic.endings["200"] > 0)
    assert traffic.failed == {}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def secured(directory: Path, *settings: str) -> RedisServer:
    """A store in which only the documented user may do anything, and only what the documentation gives it."""
    users = directory / "users.acl"
    users.write_text(f"user default off\n{ACL.format(password=PASSWORD, prefix=PREFIX)}\n")
    return RedisServer(directory, f"aclfile {users}", *settings)


def replica(cluster: Cluster, fleet: Fleet, url: str, *flags: str) -> Picker:
    return cluster.picker(
        fleet.file, f"--replica-store={url}", f"--replica-store-prefix={PREFIX}", *flags,
        workers=1, run_dir=cluster.directory / "run",
    )  # fmt: skip


def test_the_smallest_acl_is_enough_over_tls_and_the_password_stays_out_of_the_logs(cluster: Cluster, tmp_path: Path) -> None:
    fleet, authority, (port,) = cluster.fleet(1), Authority(), free_ports(1)
    pair = write_pair(tmp_path / "pair", authority.pair())
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    password = tmp_path / "password"
    password.write_text(PASSWORD + "\n")
    tls = (f"tls-port {port}", f"tls-cert-file {pair}/tls.crt", f"tls-key-file {pair}/tls.key", "tls-auth-clients no",
           f"tls-ca-cert-file {tmp_path}/ca.crt")  # fmt: skip
    with secured(tmp_path, *tls):
        url = f"rediss://picker@localhost:{port}?ca={tmp_path}/ca.crt"
        pickers = [replica(cluster, fleet, url, f"--replica-store-password-file={password}") for _ in range(2)]
        remotes = [Remote(cluster.directory / "run", picker) for picker in pickers]
        assert eventually(lambda: know_each_other(remotes, 2), 60.0)
        assert all(PASSWORD not in picker.child.text() for picker in pickers)


def test_a_store_that_refuses_the_password_ends_the_start_with_the_reason(cluster: Cluster, tmp_path: Path) -> None:
    fleet = cluster.fleet(1)
    with secured(tmp_path) as store:
        with pytest.raises(ChildFailed, match="--replica-store cannot be used") as failed:
            replica(cluster, fleet, f"redis://picker:wrong-one@127.0.0.1:{store.port}")
        assert "wrong-one" not in str(failed.value)


def test_a_store_that_is_away_is_no_obstacle_where_it_is_not_required(cluster: Cluster, tmp_path: Path) -> None:
    store = RedisServer(tmp_path)
    with store:
        store.kill()
        picker = replica(cluster, cluster.fleet(1), store.url, "--replica-store-required=false")
        other = replica(cluster, cluster.fleet(1), store.url, "--replica-store-required=false")
        store.start()
        remotes = [Remote(cluster.directory / "run", each) for each in (picker, other)]
        assert eventually(lambda: know_each_other(remotes, 2), 60.0)
