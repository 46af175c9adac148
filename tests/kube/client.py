"""The tests' own client of an API server: synchronous, for many threads, objects as plain dictionaries.

It shares nothing with the picker's client, so a fault in that one does not hide itself here.
"""

import http.client
import json
import ssl
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

Object = dict[str, Any]
R = TypeVar("R")

ANSWER_S = 20.0
THREADS = 6
MERGE = "application/merge-patch+json"
CLUSTER_WIDE = frozenset(
    ("namespaces", "customresourcedefinitions", "clusterroles", "clusterrolebindings", "priorityclasses", "nodes")
)
PLURALS = {
    "NetworkPolicy": "networkpolicies",
    "PriorityClass": "priorityclasses",
}


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, status: int, said: Any) -> None:
        self.status = status
        super().__init__(f"{status}: {said.get('message', said) if isinstance(said, dict) else said}")


class Kube:
    """One user's view of one server."""

    def __init__(self, host: str, port: int, token: str, authority: Path) -> None:
        self.host, self.port, self._token = host, port, token
        self._context = ssl.create_default_context(cafile=str(authority))
        self._idle: list[http.client.HTTPSConnection] = []

    def request(self, verb: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """The decoded answer; a connection that has gone is opened once more. Raises Refused, OSError."""
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": content_type}
        sent = None if body is None else json.dumps(body).encode()
        for last in (False, True):
            connection = self._connection()
            try:
                connection.request(verb, path, sent, headers)
                response = connection.getresponse()
                answer = response.read()
                break
            except (OSError, http.client.HTTPException):
                connection.close()
                self.close()  # they are all as old
                if last:
                    raise
        self._idle.append(connection)
        said = json.loads(answer) if answer.startswith(b"{") else answer.decode()
        if response.status >= 300:
            raise Refused(response.status, said)
        return said

    def close(self) -> None:
        """All idle connections; it can be used again."""
        while self._idle:
            self._idle.pop().close()

    def is_ready(self) -> bool:
        """Whether the server is; its port may be closed still."""
        try:
            return bool(self.request("GET", "/readyz") == "ok")
        except (Refused, OSError, http.client.HTTPException):
            return False

    def create(self, thing: Object) -> Object:
        """As it was stored."""
        path = collection(thing["apiVersion"], _plural(thing["kind"]), thing["metadata"].get("namespace", ""))
        answer: Object = self.request("POST", path, thing)
        return answer

    def apply(self, thing: Object) -> Object:
        """Created, or changed, as `kubectl apply --server-side` does it."""
        place = collection(thing["apiVersion"], _plural(thing["kind"]), thing["metadata"].get("namespace", ""))
        path = f"{place}/{thing['metadata']['name']}?fieldManager=tests&force=true"
        answer: Object = self.request("PATCH", path, thing, "application/apply-patch+yaml")
        return answer

    def get(self, thing: Object) -> Object:
        answer: Object = self.request("GET", place(thing))
        return answer

    def list(self, like: Object, selector: str = "") -> list[Object]:
        """All of the kind and namespace of this one."""
        path = collection(like["apiVersion"], _plural(like["kind"]), like["metadata"].get("namespace", ""))
        found: list[Object] = self.request("GET", path + (f"?labelSelector={selector}" if selector else ""))["items"]
        return found

    def patch(self, thing: Object, change: Object, *, status: bool = False) -> Object:
        """A merge patch of the object, or of its status."""
        path = place(thing) + ("/status" if status else "")
        answer: Object = self.request("PATCH", path, change, MERGE)
        return answer

    def delete(self, thing: Object, grace_s: int | None = None) -> None:
        """At once (0), after a grace that nobody waits for but us, or as the kind has it; what is not there is fine."""
        query = "" if grace_s is None else f"?gracePeriodSeconds={grace_s}"
        try:
            self.request("DELETE", place(thing) + query)
        except Refused as refused:
            if refused.status != 404:
                raise

    def token(self, namespace: str, account: str, expires_s: int = 3600) -> str:
        """Of a service account, which is made here."""
        meta = {"name": account, "namespace": namespace}
        try:
            self.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
        except Refused as refused:
            if refused.status != 409:
                raise
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        asked = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": expires_s},
        }
        return str(self.request("POST", path, asked)["status"]["token"])

    def _connection(self) -> http.client.HTTPSConnection:
        try:
            return self._idle.pop()
        except IndexError:
            return http.client.HTTPSConnection(self.host, self.port, timeout=ANSWER_S, context=self._context)


def collection(version: str, plural: str, namespace: str) -> str:
    root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
    return f"{root}/{plural}" if plural in CLUSTER_WIDE else f"{root}/namespaces/{namespace}/{plural}"


def place(thing: Object) -> str:
    meta = thing["metadata"]
    return f"{collection(thing['apiVersion'], _plural(thing['kind']), meta.get('namespace', ''))}/{meta['name']}"


def _plural(kind: str) -> str:
    return PLURALS.get(kind, kind.lower() + "s")


def all_at_once(act: Callable[[Any], R], things: Iterable[Any], threads: int = THREADS) -> list[R]:
    """In their order, some at a time. The first failure is raised."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(act, things))
