"""A client of an API server for the tests: synchronous, for several threads, with objects as plain dictionaries.

It shares no code with the picker's client, so a fault there cannot hide itself here.
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
CLUSTER_WIDE = frozenset(("namespaces", "customresourcedefinitions", "clusterroles", "clusterrolebindings", "priorityclasses", "nodes"))
PLURALS = {"NetworkPolicy": "networkpolicies", "PriorityClass": "priorityclasses"}


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, status: int, answer: Any) -> None:
        self.status = status
        super().__init__(f"{status}: {answer.get('message', answer) if isinstance(answer, dict) else answer}")


class Kube:
    """One server with the credentials of one user."""

    def __init__(self, host: str, port: int, token: str, authority: Path) -> None:
        self.host, self.port, self._token = host, port, token
        self._context = ssl.create_default_context(cafile=str(authority))
        self._idle: list[http.client.HTTPSConnection] = []

    def request(self, verb: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """Sends a request and returns the decoded answer. Retries once if the connection breaks. Raises Refused, OSError."""
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
                self.close()  # the other idle connections are probably broken, too
                if last:
                    raise
        self._idle.append(connection)
        decoded = json.loads(answer) if answer.startswith(b"{") else answer.decode()
        if response.status >= 300:
            raise Refused(response.status, decoded)
        return decoded

    def close(self) -> None:
        """Closes all idle connections. The client can still be used."""
        while self._idle:
            self._idle.pop().close()

    def is_ready(self) -> bool:
        """Whether the server is ready. False while its port is closed."""
        try:
            return bool(self.request("GET", "/readyz") == "ok")
        except (Refused, OSError, http.client.HTTPException):
            return False

    def create(self, thing: Object) -> Object:
        """Creates an object. Returns it as it was stored."""
        path = collection(thing["apiVersion"], _plural(thing["kind"]), thing["metadata"].get("namespace", ""))
        answer: Object = self.request("POST", path, thing)
        return answer

    def apply(self, thing: Object) -> Object:
        """Creates or changes an object, like `kubectl apply --server-side`."""
        place = collection(thing["apiVersion"], _plural(thing["kind"]), thing["metadata"].get("namespace", ""))
        path = f"{place}/{thing['metadata']['name']}?fieldManager=tests&force=true"
        answer: Object = self.request("PATCH", path, thing, "application/apply-patch+yaml")
        return answer

    def get(self, thing: Object) -> Object:
        answer: Object = self.request("GET", place(thing))
        return answer

    def list(self, like: Object, selector: str = "") -> list[Object]:
        """All objects with the kind and namespace of `like`."""
        path = collection(like["apiVersion"], _plural(like["kind"]), like["metadata"].get("namespace", ""))
        found: list[Object] = self.request("GET", path + (f"?labelSelector={selector}" if selector else ""))["items"]
        return found

    def patch(self, thing: Object, change: Object, *, status: bool = False) -> Object:
        """Sends a merge patch of an object, or of its status."""
        path = place(thing) + ("/status" if status else "")
        answer: Object = self.request("PATCH", path, change, MERGE)
        return answer

    def delete(self, thing: Object, grace_s: int | None = None) -> None:
        """Deletes an object if it exists: at once (`grace_s` is 0), after a grace period, or with the default of its kind (None)."""
        query = "" if grace_s is None else f"?gracePeriodSeconds={grace_s}"
        try:
            self.request("DELETE", place(thing) + query)
        except Refused as refused:
            if refused.status != 404:
                raise

    def token(self, namespace: str, account: str, expires_s: int = 3600) -> str:
        """A token of a service account. Creates the account if needed."""
        meta = {"name": account, "namespace": namespace}
        try:
            self.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
        except Refused as refused:
            if refused.status != 409:
                raise
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": expires_s}}
        return str(self.request("POST", path, review)["status"]["token"])

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
    """Calls `act` for all things in several threads. Returns the results in the order of the things. Raises the first failure."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(act, things))
