"""The first contact with a real store."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.redis_server import RedisServer, needs_redis
from workers.endpoints.replicas import contact
from workers.host.options import Options
from workers.process import first_contact, fork
from workers.process.errors import StartError, Unusable
from workers.process.first_contact import agreed_secret

OFFERED = b"a" * 16
LIMITED = (
    "user", "picker", "on", ">sesame-9", "~p:*", "&p:*", "resetchannels", "&p:*",
    "-@all", "+publish", "+subscribe", "+get", "+set", "+incr", "+incrby",
)  # fmt: skip

pytestmark = needs_redis


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork, "threads", lambda: 1)  # the test runner has more


def options(server: RedisServer | None = None, **more: object) -> Options:
    url = "redis://127.0.0.1:1" if server is None else server.unix_url
    return Options(**{"replica_store": url, "replica_store_prefix": "p"} | more)  # type: ignore[arg-type]


def test_the_first_replica_stores_its_secret_and_others_get_it(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        assert agreed_secret(options(server), OFFERED) == OFFERED
        assert agreed_secret(options(server), b"b" * 16) == OFFERED
        assert agreed_secret(options(server, replica_store_prefix="q"), b"c" * 16) == b"c" * 16


def test_a_store_that_is_away_is_refused_unless_it_is_not_required() -> None:
    with pytest.raises(StartError, match=r"redis://127.0.0.1:1: .*--replica-store-required=false"):
        agreed_secret(options(), OFFERED)
    with capture_logs() as lines:
        assert agreed_secret(options(replica_store_required=False), OFFERED) == b""
        assert agreed_secret(options(replica_store_required=False), b"") == b""
    own, given = lines
    assert "no prefixes" in own["later"]
    assert "--prefix-secret-file" in own["later"]
    assert "shares everything" in given["later"]


def test_an_error_of_the_process_that_asks_the_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(options: Options, offered: bytes) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(contact, "contact", broken)
    with pytest.raises(StartError, match="--replica-store cannot be used: RuntimeError: no such luck"):
        agreed_secret(options(), OFFERED)


def test_a_wrong_password_is_refused_and_not_shown(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "requirepass right-one") as server:
        url = server.unix_url.replace("unix://", "unix://:wrong-one@")
        with pytest.raises(Unusable, match="username-password") as refused:
            agreed_secret(options(server, replica_store=url), OFFERED)
        assert "wrong-one" not in str(refused.value)
        right = tmp_path / "password"
        right.write_text("right-one\n")
        assert agreed_secret(options(server, replica_store_password_file=str(right)), OFFERED) == OFFERED


def test_a_password_comes_from_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPP_REPLICA_STORE_PASSWORD", "right-one")
    with RedisServer(tmp_path, "requirepass right-one") as server:
        assert agreed_secret(options(server), OFFERED) == OFFERED


def test_a_missing_password_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="cannot be read: No such file"):
        agreed_secret(options(replica_store_password_file=str(tmp_path / "none")), OFFERED)


def test_the_smallest_acl_is_enough_and_any_smaller_one_is_refused(tmp_path: Path) -> None:
    rules = tmp_path / "users.acl"
    for missing in (None, "+publish", "+subscribe", "+set", "+incr"):
        words = [word for word in LIMITED if word != missing]
        rules.write_text(f"{' '.join(words)}\nuser default off\n")
        folder = tmp_path / (missing or "all")
        folder.mkdir()
        with RedisServer(folder, f"aclfile {rules}") as server:
            url = server.unix_url.replace("unix://", "unix://picker:sesame-9@")
            if missing is None:
                assert agreed_secret(options(server, replica_store=url), OFFERED) == OFFERED
                continue
            with pytest.raises(Unusable, match="permission"):
                agreed_secret(options(server, replica_store=url), OFFERED)


def test_a_store_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_contact, "WAIT_S", 5.0)
    with RedisServer(tmp_path) as server:
        server.pause()
        with pytest.raises(StartError, match="--replica-store cannot be used"):
            agreed_secret(options(server), OFFERED)
