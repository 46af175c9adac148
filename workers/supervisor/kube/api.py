"""A client of one Kubernetes API server: sends a request and returns the answer, or yields the events of a watch.

    Api.connect ─▶ chooses the credentials: KUBECONFIG, the pod's, or ~/.kube/config; the first request loads them
    request     ─▶ bytes of the answer, or ApiError (the server answered with an error), or Unreachable (no complete answer)
    lines       ─▶ an empty item when the watch has begun, then one JSON event per item, until the server ends it

- Expired credentials are loaded again: once when the server answers 401 or when TLS fails, and at most every `RENEW_EVERY_S`. A pod's token
  is read again every minute.
- Bodies are bytes: the caller encodes and decodes them, with msgspec.
- Only the first request needs kubernetes_asyncio (extra `k8s`), which takes some 20 MiB. A picker that follows Kubernetes imports it
  before the fork.

This module does not retry, back off, or interpret a watch (`reflect` does).
"""

import asyncio
import importlib.util
import os
import time
import urllib.parse
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple

from epp.errors import UNREADABLE
from workers.supervisor.kube.errors import MESSAGE_CHARS_MAX, ApiError, Unreachable, access, decode_status

if TYPE_CHECKING:
    import aiohttp

    from workers.supervisor.kube.session import ApiSession

RENEW_EVERY_S: Final = 5.0
ANSWER_BYTES_MAX: Final = 64 << 20
LINE_BYTES_MAX: Final = 8 << 20  # enough for every object: etcd accepts at most 1.5 MiB
START_S: Final = 10.0  # a watch has to begin within this time
CLIENT: Final = "kubernetes_asyncio"  # the client library's module
EMPTY: Final[Mapping[str, str]] = {}
NO_EXTRA: Final = "Kubernetes needs the package kubernetes-asyncio, which is not installed: pip install 'endpoint-picker[k8s]'"
NO_CLUSTER: Final = (
    "no Kubernetes API server is known: KUBECONFIG is not set, this is not a pod (KUBERNETES_SERVICE_HOST is not set), and there is "
    "no ~/.kube/config; set KUBECONFIG, or give --endpoints or a file-discovery plugin"
)


class Resource(NamedTuple):
    """One kind of object in one namespace. `group` is "" for the core group."""

    group: str
    version: str
    plural: str
    namespace: str

    @property
    def path(self) -> str:
        """The URL path of the collection."""
        root = f"/apis/{self.group}" if self.group else "/api"
        return f"{root}/{self.version}/namespaces/{self.namespace}/{self.plural}"

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


def ready_to_connect(environ: Mapping[str, str]) -> None:
    """Checks at start that the client library is installed and that a server is known. Raises ValueError; its text names the missing
    part.
    """
    if importlib.util.find_spec(CLIENT) is None:
        raise ValueError(NO_EXTRA)
    kubeconfig_files(environ)


def kubeconfig_files(environ: Mapping[str, str]) -> str:
    """Returns the kubeconfig files to use, separated by colons; "" means the pod's service account.

    Raises ValueError if there is neither a kubeconfig file nor a service account.
    """
    files = environ.get("KUBECONFIG", "")
    if files:
        if not any(os.path.exists(os.path.expanduser(path)) for path in files.split(":") if path):
            raise ValueError(f"KUBECONFIG {files}: no such file; correct it, or unset it inside a cluster")
        return files
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return ""
    home = os.path.join(environ.get("HOME", ""), ".kube", "config")
    if os.path.exists(home):
        return home
    raise ValueError(NO_CLUSTER)


class Api:
    """Sends requests to one API server, with the picker's credentials."""

    def __init__(self, open_session: Callable[[], Awaitable["ApiSession"]], now: Callable[[], float] = time.monotonic) -> None:
        """`open_session` loads the credentials and returns a session that uses them."""
        self._session: ApiSession | None = None
        self._open_session = open_session
        self._now = now
        self._renewed_at = -RENEW_EVERY_S
        self._opening = asyncio.Lock()

    @classmethod
    async def connect(cls, environ: Mapping[str, str]) -> "Api":
        """Chooses the server and the credentials. Reads no file and sends no request yet.

        Raises ValueError if no API server is known or if the client library is not installed.
        """
        ready_to_connect(environ)
        files = kubeconfig_files(environ)

        async def load() -> "ApiSession":
            from workers.supervisor.kube.session import open_session  # needs the client library

            return await open_session(files, environ)

        return cls(load)

    @property
    def host(self) -> str:
        """The URL of the server, known after the first request."""
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
        """Sends a request and returns the body of the answer. `verb` is the HTTP method. Raises ApiError, Unreachable."""
        headers = {"Content-Type": content_type} if body is not None else {}
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._send(verb, path, query, headers, body)
                async with response:
                    answer = await _read_body(response, path)
        except _failures() as failure:
            raise self._unreachable(failure, f"no answer within {timeout_s:g} s to {verb} {path}") from failure
        if response.status >= 300:
            raise _error(response, answer, access(verb, path).verb, path)
        return answer

    async def lines(self, path: str, *, query: Mapping[str, str], idle_s: float) -> AsyncGenerator[bytes, None]:
        """Yields an empty item when the watch has begun, then each event as it arrives. Ends when the server ends the watch.

        Raises ApiError if the server refuses the watch, and Unreachable if the connection breaks or no event arrives for `idle_s`.
        Close the generator with `contextlib.aclosing`.
        """
        try:
            async with asyncio.timeout(min(START_S, idle_s)):
                response = await self._send("GET", path, query, {}, None)
                if response.status >= 300:
                    async with response:
                        answer = await _read_body(response, path)
                        raise _error(response, answer, "watch", path)
        except _failures() as failure:
            raise self._unreachable(failure, f"no answer to a watch of {path}") from failure
        rest = bytearray()  # an incomplete event; it may arrive byte by byte
        try:
            yield b""
            loop = asyncio.get_running_loop()
            event_at = loop.time()  # when the last complete event arrived; a part of an event does not change it
            while True:
                async with asyncio.timeout_at(event_at + idle_s):
                    chunk = await response.content.readany()
                if not chunk:
                    return
                *whole, last = chunk.split(b"\n")
                if whole and rest:
                    whole[0], rest = bytes(rest + whole[0]), bytearray()
                rest += last
                for line in whole:
                    if line:
                        event_at = loop.time()
                        yield line
                if len(rest) > LINE_BYTES_MAX:
                    raise Unreachable(f"{self.host}: an event of {path} is longer than {LINE_BYTES_MAX} bytes")
        except _failures() as failure:
            raise self._unreachable(failure, f"nothing came for {idle_s:g} s in a watch of {path}") from failure
        finally:
            response.close()  # also closes the connection: it still receives events, so no other request can use it

    async def close(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()

    def _unreachable(self, failure: Exception, late: str) -> Unreachable:
        cause = late if type(failure) is TimeoutError else str(failure) or type(failure).__name__
        return Unreachable(f"{self.host}: {cause}")

    async def _send(
        self, verb: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes | None
    ) -> "aiohttp.ClientResponse":
        """Returns the head of the answer. Sends the request again with new credentials if the server refuses the old ones."""
        url = path + ("?" + urllib.parse.urlencode(query) if query else "")
        session = await self._current(None)
        try:
            response = await session.send(verb, url, headers, body)
        except _tls_failures():
            renewed = await self._current(session)
            if renewed is session:
                raise
            return await renewed.send(verb, url, headers, body)
        if response.status != HTTPStatus.UNAUTHORIZED or (renewed := await self._current(session)) is session:
            return response
        response.close()
        return await renewed.send(verb, url, headers, body)

    async def _current(self, refused: "ApiSession | None") -> "ApiSession":
        """Returns the current session. `refused`: a session whose credentials the server has refused.

        If `refused` is still the current session, loads the credentials again, at most every RENEW_EVERY_S.
        """
        if self._session is not None and self._session is not refused:
            return self._session
        async with self._opening:
            if self._session is refused and (refused is None or self._now() - self._renewed_at >= RENEW_EVERY_S):
                self._renewed_at = self._now()
                self._session = await self._open_session()
                if refused is not None:
                    await refused.close()
        assert self._session is not None
        return self._session


async def _read_body(response: "aiohttp.ClientResponse", path: str) -> bytes:
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
        status = decode_status(answer)
        reason, message = status.reason or reason, status.message or message
    except UNREADABLE:
        pass  # a proxy's error page, or an empty body
    wait = response.headers.get("Retry-After", "")
    retry_after_s = float(wait) if wait.isascii() and wait.isdigit() and len(wait) < 5 else 0.0
    return ApiError(response.status, reason, message, verb, path, retry_after_s=retry_after_s)


def _failures() -> tuple[type[Exception], ...]:
    """Returns the exceptions with which a connection can fail."""
    import aiohttp

    return aiohttp.ClientError, OSError


def _tls_failures() -> tuple[type[Exception], ...]:
    """Returns the exceptions that may mean that a certificate was renewed."""
    import aiohttp

    return (aiohttp.ClientSSLError,)
