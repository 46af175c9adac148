"""Tests of secrets and certificates, and of error texts that name the flag."""

import ssl
from pathlib import Path

import pytest

from tests.redis_server import RedisServer, needs_redis
from tests.workers.instances import options
from workers.process import StartError, Unusable, fork
from workers.process.credentials import certificates, prefix_seed
from workers.replicas.address import secret_of


def test_a_secret_gives_the_same_seed_every_time_and_no_secret_a_new_one(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    with_secret, without = options(tmp_path, prefix_secret_file=str(secret)), options(tmp_path)
    assert prefix_seed(with_secret) == prefix_seed(with_secret)
    assert prefix_seed(without) != prefix_seed(without)


@pytest.mark.parametrize(("content", "why"), [("short", "at least 16"), (None, "cannot be read: No such file")])
def test_an_unusable_secret_is_refused(tmp_path: Path, content: str | None, why: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StartError, match=why):
        prefix_seed(options(tmp_path, prefix_secret_file=str(path)))


def test_tls_uses_a_self_signed_certificate_by_default(tmp_path: Path) -> None:
    assert certificates(options(tmp_path)) == (None, None)
    ext_proc, metrics = certificates(options(tmp_path, secure_serving=True, tls_cipher_suites=("TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",)))
    assert ext_proc is not None
    assert metrics is None
    known = {cipher["name"] for cipher in ext_proc.context.current.get_ciphers()}
    assert "ECDHE-ECDSA-AES128-GCM-SHA256" in known
    assert "ECDHE-ECDSA-AES256-GCM-SHA384" not in known


@pytest.mark.parametrize(
    ("suites", "oldest"),
    [
        (("TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", "TLS_AES_128_GCM_SHA256"), ssl.TLSVersion.TLSv1_2),
        (("TLS_AES_128_GCM_SHA256",), ssl.TLSVersion.TLSv1_3),
    ],
)
def test_a_list_with_only_tls_1_3_suites_disables_older_versions(tmp_path: Path, suites: tuple[str, ...], oldest: ssl.TLSVersion) -> None:
    ext_proc, _ = certificates(options(tmp_path, secure_serving=True, tls_cipher_suites=suites))
    assert ext_proc is not None
    assert ext_proc.context.current.minimum_version is oldest


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tls_cipher_suites": ("TLS_NULL",)}, "unknown: TLS_NULL; give some of TLS_ECDHE"),
        ({"cert_path": "/nowhere"}, "--cert-path: /nowhere/tls.crt"),
        ({"client_ca_file": "/nowhere/ca.pem"}, "--client-ca-file: /nowhere/ca.pem: No such file"),
        ({"metrics_cert_dir": "/nowhere"}, "--metrics-cert-dir: /nowhere/tls.crt"),
    ],
)
def test_impossible_tls_settings_are_refused(tmp_path: Path, changes: dict, why: str) -> None:
    with pytest.raises(Unusable, match=why):
        certificates(options(tmp_path, secure_serving=True, **changes))


@needs_redis
def test_replicas_get_one_seed_through_the_store_unless_a_file_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork, "threads", lambda: 1)  # the test runner has more
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    with RedisServer(tmp_path) as server:
        store = {"replica_store": server.unix_url, "replica_store_prefix": "p"}
        given = prefix_seed(options(tmp_path, prefix_secret_file=str(secret), **store))
        assert given == prefix_seed(options(tmp_path, prefix_secret_file=str(secret)))
        agreed = prefix_seed(options(tmp_path, **store))
        assert prefix_seed(options(tmp_path, **store)) == agreed != given
        assert secret_of(agreed) in server.command("GET", "p:1:secret")
