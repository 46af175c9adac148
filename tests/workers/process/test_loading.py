"""What is read and checked with a configuration: files of API keys, and the secret of cache salts."""

import os
from pathlib import Path

import pytest

from epp.config.load import ConfigErrors, EffectiveConfig, load
from tests.epp.request.test_tenant_keys import hashed
from workers.host.options import Options
from workers.process.generations import Given
from workers.process.loading import KEYS_BYTES_MAX, UnreadablePlugins, load_given, read_keys, read_plugins, with_keys


def config(file: Path) -> EffectiveConfig:
    return load(f"tenants:\n  from:\n  - apiKey: {{header: authorization, file: {file}}}\n", "c.yaml")


def test_a_configuration_gets_the_keys_of_its_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"acme {hashed('one')}")
    keys = with_keys(config(file)).keys
    assert {path: found.tenant("one") for path, found in keys.items()} == {str(file): "acme"}


def test_texts_that_are_given_count_instead_of_the_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    keys = with_keys(config(file), {str(file): f"other {hashed('one')}"}).keys
    assert keys[str(file)].tenant("one") == "other"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"acme \xff", "is not UTF-8 at byte 5"),
        (b"#" * (KEYS_BYTES_MAX + 1), f"has more than {KEYS_BYTES_MAX} bytes"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_at_its_place_in_the_configuration(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigErrors) as refused:
        with_keys(config(file))
    (error,) = refused.value.errors
    assert str(error).startswith(f"c.yaml:3:43: error[tenant-keys]: the file {file} {why} (")


def test_a_pipe_has_no_keys_and_its_writer_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys")
    with pytest.raises(ConfigErrors, match="is a folder, a pipe or a device"):
        with_keys(config(tmp_path / "keys"))


def test_hidden_files_have_no_plugins_and_an_unreadable_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes(b"x = 1")
    (tmp_path / ".#mine.py").symlink_to("me@host.123")  # an editor's lock
    assert read_plugins(str(tmp_path)) == {"mine.py": b"x = 1"}
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(UnreadablePlugins, match=rf"--plugin-path {tmp_path}/folder\.py: Is a directory"):
        read_plugins(str(tmp_path))


def test_a_configuration_without_tenants_reads_nothing() -> None:
    plain = load("plugins: [{type: queue-scorer}]", "c.yaml")
    assert with_keys(plain) is plain
    assert read_keys(plain) == ({}, [])


@pytest.mark.parametrize("lasts", [{"prefix_secret_file": "s"}, {"state_dir": "d"}, {"replica_store": "r"}])
def test_cache_salts_are_refused_whenever_they_are_loaded_unless_a_secret_lasts(lasts: dict[str, str]) -> None:
    salted = Given("tenants: {from: [{header: x-tenant, trusted: true}], cacheSalt: tenant}", "c.yaml", {})
    with pytest.raises(
        ConfigErrors, match=r"^c\.yaml:1:65: error\[tenants\]: tenants\.cacheSalt: without a secret that lasts, .*--state-dir"
    ):
        load_given(Options(), salted)
    assert load_given(Options(**lasts), salted).tenants is not None  # type: ignore[arg-type]
