"""A Kubernetes API server over HTTP: one request and its answer, or a watch line by line.

    Api.connect ─▶ whose credentials: those of KUBECONFIG, of the pod, or of ~/.kube/config; they are loaded by the first request
    request     ─▶ bytes of the answer, or ApiError (it answered with an error), or Unreachable (no whole answer)
    lines       ─▶ an empty item when the watch has begun, then one JSON event per item, until the server ends it

- Credentials that expire are loaded again: once when the server says 401, or when TLS fails, and not more often than every
  `RENEW_EVERY_S`; a pod's token is read again every minute.
- Bodies are bytes in and bytes out: whoever asks decodes what he needs, with msgspec.
- kubernetes_asyncio (extra `k8s`) is imported by the first request and nowhere else, after the fork: it costs some 20 MiB.

What this does not do: retry, back off, or know what a watch means (`reflect` does).
"""

import asyncio
import importlib.util
import os
import time
import urllib.parse
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    import aiohttp

    from workers.kube.session import Session

RENEW_EVERY_S: Final = 5.0
ANSWER_BYTES_MAX: Final = 64 << 20
LINE_BYTES_MAX: Final = 8 << 20  # etcd takes objects of 1.5 MiB
MESSAGE_CHARS_MAX: Final = 512
START_S: Final = 10.0  # until a watch has begun
EMPTY: Final[Mapping[str, str]] = {}
NO_EXTRA: Final = (
    "Kubernetes needs the package kubernetes-asyncio, which is not installed: pip install 'endpoint-picker[k8s]'"
)
NO_CLUSTER: Final = (
    "no Kubernetes API server is known: KUBECONFIG is not set, this is no pod (KUBERNETES_SERVICE_HOST is not set), and there is "
    "no ~/.kube/config; set KUBECONFIG, or give --endpoints or a file-discovery plugin"
)


class Unreachable(Exception):
    """No whole answer: connection, TLS, credentials that cannot be read, time."""


class ApiError(Exception):
    """The server answered with an error. `verb` is Kubernetes' (get, list, watch, create, ...), `path` what was asked for."""

    def __init__(
        self, status: int, reason: str, message: str, verb: str, path: str, *, retry_after_s: float = 0.0
    ) -> None:
        self.status = status
        self.reason = reason
        self.message = message
        self.verb = verb
        self.path = path
        self.retry_after_s = retry_after_s
        super().__init__(self._text())

    def _text(self) -> str:
        asked = access(self.verb, self.path)
        what = f"{asked.verb} {asked.resource}" + (f" in namespace {asked.namespace}" if asked.namespace else "")
        said = f"{self.reason or self.status}: {self.message[:MESSAGE_CHARS_MAX]}"
        if self.status == HTTPStatus.FORBIDDEN:
            kind = f"a Role in namespace {asked.namespace}" if asked.namespace else "a ClusterRole"
            return f"not allowed to {what}; add to {kind} of this service account: {asked.rule()} ({said})"
        return f"the API server refused to {what}: {said}"


class Access(NamedTuple):
    """What a request is to RBAC."""

    verb: str
    group: str
    resource: str
    namespace: str = ""

    def rule(self) -> str:
        """The rule that allows it, as a Role has it."""
        return f'{{apiGroups: ["{self.group}"], resources: ["{self.resource}"], verbs: ["{self.verb}"]}}'


VERBS: Final = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def access(verb: str, path: str, *, watch: bool = False) -> Access:
    """`verb` is HTTP's or Kubernetes' own."""
    parts = path.strip("/").split("/")
    grouped = parts[0] == "apis"
    group = parts[1] if grouped and len(parts) > 1 else ""
    rest = parts[3:] if grouped else parts[2:]
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    resource = "/".join([*rest[:1], *rest[2:3]])
    if verb in ("GET", "HEAD"):
        verb = "watch" if watch else "get" if len(rest) > 1 else "list"
    return Access(VERBS.get(verb, verb), group, resource, namespace)


class Resource(NamedTuple):
    """A kind of object in one namespace; the core group is ""."""

    group: str
    version: str
    plural: str
    namespace: str

    @property
    def path(self) -> str:
        """Of the collection."""
        root = f"/apis/{self.group}" if self.group else "/api"
        return f"{root}/{self.version}/namespaces/{self.namespace}/{self.plural}"

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


class _Status(msgspec.Struct):
    """What an API server says with an error."""

    message: str = ""
    reason: str = ""


_status = msgspec.json.Decoder(_Status)


def ready_to_connect(environ: Mapping[str, str]) -> None:
    """Before anything is started: is there a client library and a server to ask? Raises ValueError with what is missing."""
    if importlib.util.find_spec("kubernetes_asyncio") is None:
        raise ValueError(NO_EXTRA)
    place(environ)


def place(environ: Mapping[str, str]) -> str:
    """The kubeconfig files to use, colon-separated; "" means the pod's own credentials. Raises ValueError."""
    given = environ.get("KUBECONFIG", "")
    if given:
        if not any(os.path.exists(os.path.expanduser(path)) for path in given.split(":") if path):
            raise ValueError(f"KUBECONFIG {given}: no such file; correct it, or unset it inside a cluster")
        return given
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return ""
    home = os.path.join(environ.get("HOME", ""), ".kube", "config")
    if os.path.exists(home):
        return home
    raise ValueError(NO_CLUSTER)


class Api:
    """One API server and our credentials for it."""

    def __init__(self, opened: Callable[[], Awaitable["Session"]], now: Callable[[], float] = time.monotonic) -> None:
        self._session: Session | None = None
        self._opened = opened
        self._now = now
        self._renewed_at = -RENEW_EVERY_S
        self._opening = asyncio.Lock()

    @classmethod
    async def connect(cls, environ: Mapping[str, str]) -> "Api":
        """Nothing is read or asked yet. Raises ValueError: there is nothing to connect to, or no library to do it."""
        ready_to_connect(environ)
        files = place(environ)

        async def opened() -> "Session":
            from workers.kube.session import open_session  # imports the client library

            return await open_session(files, environ)

        return cls(opened)

    @property
    def host(self) -> str:
        """Where the server is; known once something was asked of it."""
        return self._session.host if self._session is not None else "the Kubernetes API"

    async def request(
        self,
        verb: str,
        path: str,
        *,
        query: Mapping[str, str] = EMPTY,
        body: bytes | None = None,
        content_type: str = "application/json",
        timeout_s: float = 10.0,
    ) -> bytes:
        """The answer's body; `verb` is HTTP's. Raises ApiError, Unreachable."""
        headers = {"Content-Type": content_type} if body is not None else {}
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._sent(verb, path, query, headers, body)
                async with response:
                    answer = await _whole(response, path)
        except _failures() as failure:
            raise self._unreachable(failure, f"no answer within {timeout_s:g} s to {verb} {path}") from failure
        if response.status >= 300:
            raise _error(response, answer, access(verb, path).verb, path)
        return answer

    async def lines(self, path: str, *, query: Mapping[str, str], idle_s: float) -> AsyncGenerator[bytes, None]:
        """An empty item when the watch has begun, then its events as they come; ends when the server ends it.

        Raises ApiError, and Unreachable when it breaks or nothing came for `idle_s`. Close it by `contextlib.aclosing`.
        """
        try:
            async with asyncio.timeout(min(START_S, idle_s)):
                response = await self._sent("GET", path, query, {}, None)
                if response.status >= 300:
                    async with response:
                        answer = await _whole(response, path)
                        raise _error(response, answer, "watch", path)
        except _failures() as failure:
            raise self._unreachable(failure, f"no answer to a watch of {path}") from failure
        rest = b""
        try:
            yield b""
            loop = asyncio.get_running_loop()
            came_at = loop.time()  # when a whole event did: single bytes are no sign of life
            while True:
                async with asyncio.timeout_at(came_at + idle_s):
                    chunk = await response.content.readany()
                if not chunk:
                    return
                *whole, rest = (rest + chunk).split(b"\n") if rest else chunk.split(b"\n")
                for line in whole:
                    if line:
                        came_at = loop.time()
                        yield line
                if len(rest) > LINE_BYTES_MAX:
                    raise Unreachable(f"{self.host}: an event of {path} is longer than {LINE_BYTES_MAX} bytes")
        except _failures() as failure:
            raise self._unreachable(failure, f"nothing came for {idle_s:g} s in a watch of {path}") from failure
        finally:
            response.close()  # a watch that is left cannot be used again

    async def close(self) -> None:
        """Drop all connections."""
        if self._session is not None:
            await self._session.close()

    def _unreachable(self, failure: Exception, late: str) -> Unreachable:
        cause = late if type(failure) is TimeoutError else str(failure) or type(failure).__name__
        return Unreachable(f"{self.host}: {cause}")

    async def _sent(
        self, verb: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes | None
    ) -> "aiohttp.ClientResponse":
        """The answer's head; with fresh credentials when the old ones are refused."""
        url = path + ("?" + urllib.parse.urlencode(query) if query else "")
        session = await self._current(None)
        try:
            response = await session.send(verb, url, headers, body)
        except _distrusted():
            renewed = await self._current(session)
            if renewed is session:
                raise
            return await renewed.send(verb, url, headers, body)
        if response.status != HTTPStatus.UNAUTHORIZED or (renewed := await self._current(session)) is session:
            return response
        response.close()
        return await renewed.send(verb, url, headers, body)

    async def _current(self, refused: "Session | None") -> "Session":
        """The session; with credentials loaded again when `refused` is it, and they may be others by now."""
        if self._session is not None and self._session is not refused:
            return self._session
        async with self._opening:
            if self._session is refused and (refused is None or self._now() - self._renewed_at >= RENEW_EVERY_S):
                self._renewed_at = self._now()
                self._session = await self._opened()
                if refused is not None:
                    await refused.close()
        assert self._session is not None
        return self._session


async def _whole(response: "aiohttp.ClientResponse", path: str) -> bytes:
    chunks, size = [], 0
    while chunk := await response.content.readany():
        size += len(chunk)
        if size > ANSWER_BYTES_MAX:
            raise Unreachable(f"the answer to {path} is longer than {ANSWER_BYTES_MAX} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _error(response: "aiohttp.ClientResponse", answer: bytes, verb: str, path: str) -> ApiError:
    reason, message = response.reason or "", answer[:MESSAGE_CHARS_MAX].decode(errors="replace").strip()
    try:
        said = _status.decode(answer)
        reason, message = said.reason or reason, said.message or message
    except msgspec.DecodeError:
        pass  # a proxy's page, or nothing
    wait = response.headers.get("Retry-After", "")
    retry_after_s = float(wait) if wait.isascii() and wait.isdigit() and len(wait) < 5 else 0.0
    return ApiError(response.status, reason, message, verb, path, retry_after_s=retry_after_s)


def _failures() -> tuple[type[Exception], ...]:
    """What a connection can end with."""
    import aiohttp

    return aiohttp.ClientError, OSError


def _distrusted() -> tuple[type[Exception], ...]:
    """TLS said no: a certificate was renewed, perhaps."""
    import aiohttp

    return (aiohttp.ClientSSLError,)
