"""The configurations of --config-dir: which pool has which, and what is wrong before anything is served."""

import json
from pathlib import Path

import pytest

from workers.cli.flags import BadConfiguration
from workers.cli.several_pools import found
from workers.host.options import Options

CONFIG = "plugins: [{type: random-picker}]\n"
KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "x",
    "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
    "clusters": [{"name": "x", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "x", "user": {"token": "t"}}],
}


@pytest.fixture(autouse=True)
def kubeconfig(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path_factory.mktemp("kube") / "config"
    file.write_text(json.dumps(KUBECONFIG))
    monkeypatch.setenv("KUBECONFIG", str(file))


def options(folder: Path, *names: str) -> Options:
    by = {"pool_name": ",".join(names), "pool_given": True} if names else {"service_name": "epp"}
    return Options(config_dir=str(folder), pool_ports=(9102, 9103), **by)


def refused(folder: Path, *names: str) -> str:
    with pytest.raises(BadConfiguration) as bad:
        found(options(folder, *names))
    return bad.value.message


def test_each_pool_has_its_file_and_the_others_have_the_default(tmp_path: Path) -> None:
    (tmp_path / "llama.yaml").write_text(CONFIG)
    found(options(tmp_path))
    assert "there is neither qwen.yaml nor default.yaml" in refused(tmp_path, "llama", "qwen")
    (tmp_path / "default.yaml").write_text(CONFIG)
    found(options(tmp_path, "llama", "qwen"))


def test_a_file_without_a_pool_gets_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.yaml").write_text(CONFIG)
    found(options(tmp_path, "a", "b"))
    assert "c.yaml has no effect: no --pool-name has this name" in capsys.readouterr().err


def test_all_bad_files_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("plugins: [{type: no-such}]\n")
    (tmp_path / "b.yaml").write_text("dataLayer: {discovery: {endpoints: {pluginRef: f}}}\nplugins: [{type: file-discovery, name: f}]\n")
    (tmp_path / "default.yaml").write_text(CONFIG)
    message = refused(tmp_path)
    assert "a.yaml:1" in message and "b.yaml" in message


def test_a_missing_folder_and_an_impossible_name_are_refused(tmp_path: Path) -> None:
    assert "No such file or directory" in refused(tmp_path / "absent")
    assert "--pool-name 'B'" in refused(tmp_path, "a", "B")
