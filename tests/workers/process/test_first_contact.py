"""The first contact with a real store."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.redis_server import RedisServer, needs_redis
from tests.waiting import wait_until
from workers.host.options import Options, ReplicaStore
from workers.process import StartError, Unusable, first_contact, fork
from workers.process.first_contact import agreed_secret

OFFERED = b"a" * 16
WAIT_S = 30.0
RIGHTS = ("+publish", "+subscribe", "+get", "+set", "+incrby")  # docs/replicas.md has the same

pytestmark = needs_redis


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork, "threads", lambda: 1)  # the test runner has more


def store(server: RedisServer | None = None, **more: object) -> ReplicaStore:
    url = "redis://127.0.0.1:1" if server is None else server.unix_url
    return Options(**{"replica_store": url, "replica_store_prefix": "p"} | more).store  # type: ignore[arg-type]


def test_the_first_replica_stores_its_secret_and_others_get_it(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        assert agreed_secret(store(server), OFFERED) == OFFERED
        assert agreed_secret(store(server), b"b" * 16) == OFFERED
        assert agreed_secret(store(server, replica_store_prefix="q"), b"c" * 16) == b"c" * 16


def test_a_store_that_is_away_is_refused_unless_it_is_not_required() -> None:
    with pytest.raises(StartError, match=r"redis://127.0.0.1:1: .*--replica-store-required=false"):
        agreed_secret(store(), OFFERED)
    with capture_logs() as lines:
        assert agreed_secret(store(replica_store_required=False), OFFERED) == b""
        assert agreed_secret(store(replica_store_required=False), b"") == b""
    own, given = lines
    assert "no prefixes" in own["later"]
    assert "--prefix-secret-file" in own["later"]
    assert "shares everything" in given["later"]


def test_an_error_of_the_process_that_asks_the_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(store: ReplicaStore, offered: bytes) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr("workers.replicas.store.contact", broken)
    with pytest.raises(StartError, match="--replica-store cannot be used: RuntimeError: no such luck"):
        agreed_secret(store(), OFFERED)


def test_a_wrong_password_is_refused_and_not_shown(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "requirepass right-one") as server:
        url = server.unix_url.replace("unix://", "unix://:wrong-one@")
        with pytest.raises(Unusable, match="username-password") as refused:
            agreed_secret(store(server, replica_store=url), OFFERED)
        assert "wrong-one" not in str(refused.value)
        right = tmp_path / "password"
        right.write_text("right-one\n")
        assert agreed_secret(store(server, replica_store_password_file=str(right)), OFFERED) == OFFERED


def test_a_password_comes_from_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPP_REPLICA_STORE_PASSWORD", "right-one")
    with RedisServer(tmp_path, "requirepass right-one") as server:
        assert agreed_secret(store(server), OFFERED) == OFFERED


def test_a_missing_password_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="cannot be read: No such file"):
        agreed_secret(store(replica_store_password_file=str(tmp_path / "none")), OFFERED)


def limit(server: RedisServer, rights: Sequence[str], prefix: str = "p") -> None:
    """Gives the store a user who has only these rights on the names of one prefix."""
    names = (f"~{prefix}:1:*", "resetchannels", f"&{prefix}:1:*")
    server.command("ACL", "SETUSER", "picker", "reset", "on", ">sesame-9", *names, "-@all", *rights)


def test_the_smallest_acl_is_enough_and_any_smaller_one_is_refused(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        url = server.unix_url.replace("unix://", "unix://picker:sesame-9@")
        limit(server, RIGHTS)
        assert agreed_secret(store(server, replica_store=url), OFFERED) == OFFERED
        for missing in RIGHTS:
            server.command("FLUSHALL")
            limit(server, [right for right in RIGHTS if right != missing])
            with pytest.raises(Unusable, match=f"permissions to run the '{missing[1:]}'"):
                agreed_secret(store(server, replica_store=url), OFFERED)


def test_another_database_than_0_needs_the_right_to_select_it(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        url = server.unix_url.replace("unix://", "unix://picker:sesame-9@") + "?db=3"
        limit(server, RIGHTS)
        with pytest.raises(Unusable, match="permissions to run the 'select'"):
            agreed_secret(store(server, replica_store=url), OFFERED)
        limit(server, [*RIGHTS, "+select"])
        assert agreed_secret(store(server, replica_store=url), OFFERED) == OFFERED


def test_a_cluster_needs_two_more_rights_and_names_in_braces(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "cluster-enabled yes", "cluster-announce-ip 127.0.0.1") as server:
        server.command("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        wait_until(lambda: b"cluster_state:ok" in server.command("CLUSTER", "INFO"))
        url = f"redis://picker:sesame-9@127.0.0.1:{server.port}?cluster=true"
        for less in ((), ("+cluster|slots",), ("+command",)):
            limit(server, [*RIGHTS, *less], "{p}")
            with pytest.raises(StartError, match="--replica-store cannot be used"):
                agreed_secret(store(server, replica_store=url), OFFERED)
        limit(server, [*RIGHTS, "+cluster|slots", "+command"], "{p}")
        assert agreed_secret(store(server, replica_store=url), OFFERED) == OFFERED


def test_a_user_of_the_url_counts_without_a_password_too(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        server.command("ACL", "SETUSER", "open", "on", "nopass", "~*", "&*", "+@all")
        server.command("ACL", "SETUSER", "default", "nopass", "-@all")
        url = server.unix_url.replace("unix://", "unix://open@")
        assert agreed_secret(store(server, replica_store=url), OFFERED) == OFFERED
        with pytest.raises(Unusable, match="username-password"):
            agreed_secret(store(server, replica_store=url.replace("open@", "nobody@")), OFFERED)


def test_a_store_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_contact, "WAIT_S", 5.0)
    with RedisServer(tmp_path) as server:
        server.pause()
        with pytest.raises(StartError, match="--replica-store cannot be used"):
            agreed_secret(store(server), OFFERED)
