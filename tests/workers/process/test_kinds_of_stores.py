"""The first contact with a store over TLS, in a cluster, and behind Sentinel."""

import subprocess
from pathlib import Path

import pytest
import trustme

from loadtest.demo.ports import free_ports
from tests.redis_server import RedisServer, needs_redis, program
from tests.waiting import wait_until
from workers.host.options import Options, ReplicaStore
from workers.process import StartError, Unusable, fork
from workers.process.first_contact import agreed_secret

OFFERED = b"a" * 16
WAIT_S = 30.0

pytestmark = needs_redis


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork, "threads", lambda: 1)  # the test runner has more


def store(url: str) -> ReplicaStore:
    return Options(replica_store=url, replica_store_prefix="p").store


def test_a_store_with_tls_must_have_a_certificate_of_the_ca_for_its_host(tmp_path: Path) -> None:
    ca, other = trustme.CA(), trustme.CA()
    cert, key, roots, others = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem", "other.pem"))
    issued = ca.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    ca.cert_pem.write_to_path(roots)
    other.cert_pem.write_to_path(others)
    (port,) = free_ports(1)
    tls = (f"tls-port {port}", f"tls-cert-file {cert}", f"tls-key-file {key}", f"tls-ca-cert-file {roots}")
    with RedisServer(tmp_path, *tls):  # it also asks for the client's certificate
        url = f"rediss://127.0.0.1:{port}?ca={roots}&cert={cert}&key={key}"
        assert agreed_secret(store(url), OFFERED) == OFFERED
        with pytest.raises(StartError, match="certificate verify failed"):
            agreed_secret(store(url.replace("ca.pem", "other.pem")), OFFERED)
        with pytest.raises(StartError, match="cannot be used"):
            agreed_secret(store(f"rediss://127.0.0.1:{port}?ca={roots}"), OFFERED)
        with pytest.raises(StartError, match="cannot be used"):
            agreed_secret(store(url.replace("127.0.0.1", "localhost")), OFFERED)


def test_a_cluster_is_used_by_the_node_that_has_the_keys(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "cluster-enabled yes", "cluster-announce-ip 127.0.0.1") as server:
        server.command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        wait_until(lambda: b"cluster_state:ok" in server.command("CLUSTER", "INFO"))
        url = f"redis://127.0.0.1:{server.port}?cluster=true"
        assert agreed_secret(store(url), OFFERED) == OFFERED
        assert OFFERED in server.command("GET", "{p}:1:secret")


def test_sentinel_names_the_server_to_a_user_of_its_own(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with RedisServer(tmp_path) as server:
        configuration = tmp_path / "sentinel.conf"
        configuration.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor mymaster 127.0.0.1 {server.port} 1\n"
            "user watcher on >sesame-9 -@all +sentinel|masters\nuser default off\n"
        )
        path = program()
        assert path is not None
        with (tmp_path / "sentinel.log").open("ab") as output:
            sentinel = subprocess.Popen([path, str(configuration), "--sentinel"], stdout=output, stderr=output)
        try:
            password = tmp_path / "sentinel-password"
            password.write_text("sesame-9\n")
            own = f"sentinel_user=watcher&sentinel_password_file={password}"
            url = f"redis+sentinel://127.0.0.1:{port}/mymaster?{own}"

            def agrees() -> bool:
                try:
                    return agreed_secret(store(url), OFFERED) == OFFERED
                except StartError:
                    return False

            wait_until(agrees)
            with pytest.raises(StartError, match="No master found for 'another'"):
                agreed_secret(store(url.replace("mymaster", "another")), OFFERED)
            password.write_text("wrong-one")
            with pytest.raises(Unusable, match="AuthenticationError") as refused:
                agreed_secret(store(url), OFFERED)
            assert "wrong-one" not in str(refused.value)
            with pytest.raises(Unusable, match="AuthenticationError"):
                agreed_secret(store(url.partition("?")[0]), OFFERED)
            password.unlink()
            with pytest.raises(Unusable, match="sentinel-password cannot be read: No such file"):
                agreed_secret(store(url), OFFERED)
        finally:
            sentinel.kill()
            sentinel.wait()
