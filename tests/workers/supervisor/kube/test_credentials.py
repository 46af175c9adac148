"""Credentials that can never work: the start is refused, and the text names the file, the fault and the fix."""

import base64
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epp.config.load import EffectiveConfig
from tests.workers.authority import Authority
from tests.workers.supervisor.kube.test_api import kubeconfig
from workers.cli.configuration import check_kubernetes, load_config
from workers.cli.flags import BadConfiguration
from workers.host.options import Options
from workers.supervisor.kube.credentials import check_credentials

SERVER = "https://10.0.0.1:6443"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that a kubeconfig may name, and a kubeconfig `config` that names none of them."""
    pair = Authority().pair()
    for name, text in (("ca", Authority().pem), ("crt", pair.chain), ("key", pair.key), ("token", b"tok")):
        (tmp_path / name).write_bytes(text)
    (tmp_path / "text").write_text("no certificate")
    kubeconfig(tmp_path, SERVER, token="tok")
    return tmp_path


def changed(folder: Path, change: Change) -> str:
    """Changes the kubeconfig. Returns its path."""
    file = folder / "config"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    return str(file)


def cluster(**values: Any) -> Change:
    return lambda config: config["clusters"][0]["cluster"].update(values)


def user(**values: Any) -> Change:
    return lambda config: config["users"][0].update(user={key.replace("_", "-"): value for key, value in values.items()})


def both(*changes: Change) -> Change:
    return lambda config: [change(config) for change in changes]


GOOD: dict[str, Change] = {
    "a token": lambda config: None,
    "a CA": cluster(**{"certificate-authority": "ca"}),
    "a certificate": user(client_certificate="crt", client_key="key"),
    "a certificate and its key as data": user(
        client_certificate_data=base64.b64encode(b"-----BEGIN CERTIFICATE-----").decode(),
        client_key_data=base64.b64encode(b"-----BEGIN EC PRIVATE KEY-----").decode(),
    ),
    "a token file": user(tokenFile="token"),
    "an exec plugin": user(exec={"command": sys.executable}),
    "plain HTTP without a user": both(cluster(server="http://h:1"), lambda c: c["contexts"][0]["context"].pop("user")),
    "files of a user that plain HTTP does not read": both(cluster(server="http://h:1"), user(client_certificate="none")),
}
BAD: dict[str, tuple[Change, str]] = {
    "no current context": (lambda c: c.pop("current-context"), "has no current-context; write one with kubectl config"),
    "an empty current context": (lambda c: c.update({"current-context": ""}), "has no current-context"),
    "an unknown context": (lambda c: c.update({"current-context": "x"}), "'x' is not among the contexts (known: c)"),
    "no contexts": (lambda c: c.update(contexts=None), "the current-context 'c' is not among the contexts (there is none)"),
    "contexts of another shape": (lambda c: c.update(contexts={"c": 1}), "contexts is no list, but a dict"),
    "an item of another shape": (lambda c: c.update(users=[1]), "users[0] is no mapping with name and user"),
    "an unknown cluster": (lambda c: c.update(clusters=[]), "context 'c' names the cluster 'k', which is not among"),
    "no cluster": (lambda c: c["contexts"][0].update(context={"user": "u"}), "context 'c' names no cluster (known: k)"),
    "an unknown user": (lambda c: c.update(users=[]), "context 'c' names the user 'u', which is not among the users"),
    "no user with TLS": (lambda c: c["contexts"][0]["context"].pop("user"), "context 'c' names no user (known: u)"),
    "no server": (cluster(server=None), "cluster 'k' has no server; give it an http:// or https:// URL"),
    "a server without a scheme": (cluster(server="10.0.0.1"), "cluster 'k' has no server"),
    "a missing CA": (cluster(**{"certificate-authority": "none"}), "/none: cannot be read: No such file or directory; "),
    "a CA that is none": (cluster(**{"certificate-authority": "text"}), "/text: has no CA certificate in PEM form"),
    "CA data that are none": (cluster(**{"certificate-authority-data": "!"}), "certificate-authority-data is not base64"),
    "a missing certificate": (user(client_certificate="none", client_key="key"), "/none: cannot be read"),
    "a certificate that is none": (user(client_certificate="text", client_key="key"), "/text: has no certificate in PEM"),
    "a certificate without its key": (user(client_certificate="crt"), "/crt: has no private key in PEM form"),
    "a missing token file": (user(tokenFile="none"), "/none: cannot be read"),
    "a missing exec plugin": (user(exec={"command": "no-such-plugin"}), "the exec plugin 'no-such-plugin' is not installed"),
    "exec without a command": (user(exec={"args": []}), "exec has no command"),
}


@pytest.mark.parametrize("what", GOOD)
def test_a_kubeconfig_that_may_work_is_accepted(what: str, folder: Path) -> None:
    check_credentials(changed(folder, GOOD[what]))


@pytest.mark.parametrize("what", BAD)
def test_a_kubeconfig_that_can_never_work_is_refused_with_the_file_and_the_fix(what: str, folder: Path) -> None:
    change, text = BAD[what]
    with pytest.raises(ValueError) as refused:
        check_credentials(changed(folder, change))
    assert text in str(refused.value)
    assert str(folder) in str(refused.value)
    assert ";" in str(refused.value) or "(known: " in str(refused.value) or "(there is none)" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [", ":2: not YAML: "),
        ("clusters:\n- name: x\n  - y\n", ":3: not YAML: "),
        ("", ": is no kubeconfig, but empty; "),
        ("[]", ": is no kubeconfig, but a list; "),
        ("\x00", ": not YAML: "),
    ],
)
def test_a_file_that_is_no_kubeconfig_is_named_with_its_line(text: str, told: str, folder: Path) -> None:
    (folder / "config").write_text(text)
    with pytest.raises(ValueError) as refused:
        check_credentials(str(folder / "config"))
    assert str(refused.value).startswith(f"{folder}/config{told}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_must_not_be_read_is_named(folder: Path) -> None:
    (folder / "config").chmod(0)
    with pytest.raises(ValueError, match="config: cannot be read: Permission denied"):
        check_credentials(str(folder / "config"))


def test_several_files_are_merged_as_the_client_library_merges_them(folder: Path) -> None:
    changed(folder, lambda config: config.pop("current-context"))
    (folder / "more").write_text(json.dumps({"current-context": "c", "clusters": [{"name": "k", "cluster": {}}]}))
    check_credentials(f"/none:{folder}/config:{folder}/more")
    with pytest.raises(ValueError, match="more: cluster 'k' has no server"):
        check_credentials(f"{folder}/more:{folder}/config")


def test_a_pod_without_a_token_or_a_ca_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"/token: cannot be read: .*; set automountServiceAccountToken to true"):
        check_credentials("", str(tmp_path))
    (tmp_path / "token").write_text("tok")
    (tmp_path / "ca.crt").write_text("")
    with pytest.raises(ValueError, match=r"/ca\.crt: is empty; delete the pod"):
        check_credentials("", str(tmp_path))
    (tmp_path / "ca.crt").write_text("pem")
    check_credentials("", str(tmp_path))


def config_of(options: Options) -> EffectiveConfig:
    return load_config(options)


def test_the_start_is_refused_only_if_endpoints_come_from_kubernetes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", changed(folder, BAD["no current context"][0]))
    options = Options(pool_given=True)
    with pytest.raises(BadConfiguration, match=f"error: Kubernetes: {folder}/config: has no current-context") as refused:
        check_kubernetes(options, config_of(options))
    assert refused.value.exit_code == 78
    elsewhere = Options(pool_given=True, endpoints="a:1")
    check_kubernetes(elsewhere, config_of(elsewhere))
