"""The errors of requests to a Kubernetes API server, and the access that a request needs by RBAC."""

from http import HTTPStatus
from typing import Final, NamedTuple

import msgspec

from workers.shared.doctor_report import NOT_ALLOWED

MESSAGE_CHARS_MAX: Final = 512


class Unreachable(Exception):
    """Raised if there is no complete answer: the connection or TLS failed, the credentials cannot be read, or the time-out passed."""

    def __init__(self, text: str) -> None:
        super().__init__(_encodable(text))


class ApiError(Exception):
    """Raised if the server answers with an error.

    `verb`: the verb of Kubernetes (get, list, watch, create, ...). `path`: the path of the request. `retry_after_s`: the pause that the
    server asked for, in seconds, or 0.
    """

    def __init__(self, status: int, reason: str, message: str, verb: str, path: str, *, retry_after_s: float = 0.0) -> None:
        self.status = status
        self.reason = _encodable(reason)
        self.message = _encodable(message)
        self.verb = verb
        self.path = path
        self.retry_after_s = retry_after_s
        super().__init__(self._text())

    def _text(self) -> str:
        needed = access(self.verb, self.path)
        what = f"{needed.verb} {needed.resource}" + (f" in namespace {needed.namespace}" if needed.namespace else "")
        answer = f"{self.reason or self.status}: {self.message[:MESSAGE_CHARS_MAX]}"
        if self.status == HTTPStatus.FORBIDDEN:
            kind = f"a Role in namespace {needed.namespace}" if needed.namespace else "a ClusterRole"
            return f"{NOT_ALLOWED} {what}; add to {kind} of this service account: {needed.rule()} ({answer})"
        return f"the API server refused to {what}: {answer}"


def _encodable(text: str) -> str:
    """Returns a text that every page can show. The client gives bytes of a head that are not UTF-8 as halves of surrogate pairs."""
    return text.encode(errors="replace").decode()


class ApiStatus(msgspec.Struct):
    """The body of an API server's error, and of an error in a watch (`Status` of the Kubernetes API)."""

    code: int = 0
    reason: str = ""
    message: str = ""


decode_status = msgspec.json.Decoder(ApiStatus).decode


class Access(NamedTuple):
    """The access that a request needs, in the terms of Kubernetes RBAC. `name`: the name of the only object that the request needs; ""
    means all objects.
    """

    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""

    def rule(self) -> str:
        """Returns the rule of a Role that grants this access, as YAML."""
        named = f', resourceNames: ["{self.name}"]' if self.name else ""
        return f'{{apiGroups: ["{self.group}"], resources: ["{self.resource}"]{named}, verbs: ["{self.verb}"]}}'


VERBS: Final = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def access(verb: str, path: str) -> Access:
    """Returns the access that a request needs. `verb`: an HTTP method or a verb of Kubernetes."""
    parts = path.strip("/").split("/")
    grouped = parts[0] == "apis"
    group = parts[1] if grouped and len(parts) > 1 else ""
    rest = parts[3:] if grouped else parts[2:]
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    resource = "/".join([*rest[:1], *rest[2:3]])
    if verb in ("GET", "HEAD"):
        verb = "get" if len(rest) > 1 else "list"
    return Access(VERBS.get(verb, verb), group, resource, namespace)
