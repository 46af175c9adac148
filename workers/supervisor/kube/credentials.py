"""Checks at start that the credentials for the API server can work at all: the kubeconfig, or the pod's service account.

Otherwise a wrong file would look as if the API server were away: the picker would wait for ever. The client library reads the same files
later, after the fork, with less precise errors. Several kubeconfig files are merged as in the library: if contexts, clusters or users have
the same name, the first one is used; for `current-context`, the last one.

This module does not send requests, run exec plugins, or check expiry times, because these may be repaired while the picker runs.
"""

import base64
import binascii
import os
import shutil
import ssl
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import yaml

SERVICE_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
FILE_BYTES_MAX: Final = 4 << 20
NAMES_SHOWN_MAX: Final = 8
PARTS: Final = ("contexts", "clusters", "users")

Mappings = dict[str, Any]


def check_credentials(files: str, folder: str = SERVICE_ACCOUNT) -> None:
    """Raises ValueError with the file, the fault and the fix if the picker could never reach the API server with these credentials.

    `files`: kubeconfig files, separated by colons; "" stands for the service account of the pod, whose files are in `folder`.
    """
    if files:
        _check_kubeconfig([path for path in map(os.path.expanduser, files.split(":")) if path and os.path.exists(path)])
        return
    for name in ("token", "ca.crt"):
        path = os.path.join(folder, name)
        if not _content(path, "set automountServiceAccountToken to true in the pod and its service account").strip():
            raise ValueError(f"{path}: is empty; delete the pod, so that it gets a new one")


def _check_kubeconfig(paths: list[str]) -> None:
    merged: dict[str, dict[str, tuple[str, Mappings]]] = {part: {} for part in PARTS}  # part -> name -> file, value
    current, holder = "", paths[-1]
    for path in paths:
        document = _document(path)
        if "current-context" in document:
            current, holder = str(document["current-context"] or ""), path
        for part in PARTS:
            for name, value in _named(document, part, path):
                merged[part].setdefault(name, (path, value))
    contexts = merged["contexts"]
    if not current:
        raise ValueError(f"{holder}: has no current-context; write one with kubectl config use-context NAME{_known(contexts)}")
    if current not in contexts:
        raise ValueError(f"{holder}: the current-context '{current}' is not among the contexts{_known(contexts)}")
    path, context = contexts[current]
    where, cluster = _referred(path, current, context, "cluster", merged["clusters"])
    server = cluster.get("server")
    if not isinstance(server, str) or not server.startswith(("http://", "https://")):
        raise ValueError(f"{where}: cluster '{context['cluster']}' has no server; give it an http:// or https:// URL")
    user: Mappings = {}
    if context.get("user") or server.startswith("https"):
        holder, user = _referred(path, current, context, "user", merged["users"])
    if server.startswith("https"):
        _check_tls(cluster, user, where)
    _check_user(user, holder)


def _document(path: str) -> Mappings:
    text = _content(path, "correct KUBECONFIG, or make it readable")
    try:
        document = yaml.load(text, yaml.CSafeLoader)
    except yaml.MarkedYAMLError as wrong:
        line = wrong.problem_mark.line + 1 if wrong.problem_mark else 1
        raise ValueError(f"{path}:{line}: not YAML: {wrong.problem}; correct the file") from wrong
    except (yaml.YAMLError, ValueError, RecursionError) as wrong:
        raise ValueError(f"{path}: not YAML: {wrong}; correct the file") from wrong
    if not isinstance(document, dict):
        raise ValueError(f"{path}: is no kubeconfig, but {_kind(document)}; write one with kubectl config view --raw --flatten")
    return document


def _content(path: str, fix: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(FILE_BYTES_MAX)
    except OSError as failure:
        raise ValueError(f"{path}: cannot be read: {failure.strerror}; {fix}") from failure


def _named(document: Mappings, part: str, path: str) -> Iterator[tuple[str, Mappings]]:
    """Yields name and value of each item of a part."""
    items = document.get(part) or []
    if not isinstance(items, list):
        raise ValueError(f"{path}: {part} is no list, but {_kind(items)}; correct the file")
    for number, item in enumerate(items):
        value = item.get(part.removesuffix("s")) if isinstance(item, dict) else None
        if not isinstance(item, dict) or "name" not in item or not isinstance(value, dict | None):
            raise ValueError(f"{path}: {part}[{number}] is no mapping with name and {part.removesuffix('s')}; correct the file")
        yield str(item["name"]), value or {}


def _referred(path: str, current: str, context: Mappings, part: str, known: Mapping[str, tuple[str, Mappings]]) -> tuple[str, Mappings]:
    """Returns file and value of the cluster or user that the context names."""
    name = context.get(part)
    if name is None or str(name) not in known:
        told = f"names no {part}" if name is None else f"names the {part} '{name}', which is not among the {part}s"
        raise ValueError(f"{path}: context '{current}' {told}{_known(known)}")
    return known[str(name)]


def _check_tls(cluster: Mappings, user: Mappings, path: str) -> None:
    """Checks the certificates. Their paths are relative to the folder of `path`, the file that has the cluster."""
    authority = _pem(cluster, "certificate-authority", path)
    if authority is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=authority.text.decode("ascii", "replace"))
        except (ssl.SSLError, ValueError) as wrong:
            raise ValueError(f"{authority.where}: has no CA certificate in PEM form; give the CA of the API server") from wrong
    certificate, key = _pem(user, "client-certificate", path), _pem(user, "client-key", path)
    if certificate is None:
        return
    key = key or certificate  # one file may have both
    for what, pem in (("CERTIFICATE", certificate), ("PRIVATE KEY", key)):
        if f"{what}-----".encode() not in pem.text:
            raise ValueError(f"{pem.where}: has no {what.lower()} in PEM form; give the user a client-certificate and its client-key")


class _Pem(NamedTuple):
    """The content of a certificate or key, and its place."""

    where: str
    text: bytes


def _pem(holder: Mappings, name: str, path: str) -> _Pem | None:
    """Returns a certificate or key, or None. Inline data take precedence over a file."""
    if data := holder.get(f"{name}-data"):
        try:
            return _Pem(f"{path}: {name}-data", base64.b64decode(str(data), validate=True))
        except (binascii.Error, ValueError) as wrong:
            raise ValueError(f"{path}: {name}-data is not base64; encode the PEM file with base64 -w0") from wrong
    if f"{name}-data" in holder or not (file := holder.get(name)):
        return None
    where = _beside(path, file)
    return _Pem(where, _content(where, f"{path} names it as {name}: correct the path, or make the file readable"))


def _beside(path: str, file: object) -> str:
    """Returns the path of a file that a kubeconfig names, which may be relative to the path of the kubeconfig."""
    return os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(path)), str(file)))


def _check_user(user: Mappings, path: str) -> None:
    """Checks the token file and the exec plugin of a user."""
    if "token" not in user and (file := user.get("tokenFile")):
        _content(_beside(path, file), f"{path} names it as tokenFile: correct the path, or make the file readable")
    plugin = user.get("exec")
    if not isinstance(plugin, dict):
        return
    command = str(plugin.get("command") or "")
    if not command or shutil.which(command) is None:
        told = f"the exec plugin '{command}' is not installed" if command else "exec has no command"
        raise ValueError(f"{path}: {told}; install it, or give the user a token or a client certificate")


def _known(names: Mapping[str, Any]) -> str:
    """Returns the known names, as a hint."""
    shown = ", ".join(list(names)[:NAMES_SHOWN_MAX])
    return f" (known: {shown})" if shown else " (there is none)"


def _kind(value: object) -> str:
    return "empty" if value is None else f"a {type(value).__name__}"
