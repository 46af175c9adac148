"""Opens an HTTP session with the credentials of a kubeconfig or of the pod. This module imports the client library.

kubernetes_asyncio loads the credentials: contexts, several files, tokens, client certificates, exec plugins, OIDC. It also reads a
pod's token again every minute. `Api` loads all other credentials again when the server refuses them.
"""

import asyncio
import contextlib
import logging
import os
import signal
import ssl
from collections.abc import Mapping
from typing import Any

import aiohttp
import yaml

from workers.supervisor.kube.errors import Unreachable
from workers.supervisor.kube.generated import without_models

with without_models():
    from kubernetes_asyncio.client import Configuration
    from kubernetes_asyncio.client.rest import RESTClientObject
    from kubernetes_asyncio.config import ConfigException, kube_config, load_incluster_config

LOAD_S_MAX = 30.0  # an exec plugin may send requests to another server
CONNECT_S = 5.0
CONNECTIONS_MAX = 0  # no limit: each watch keeps a connection, and with several pools there are up to six per namespace
USER_AGENT = "endpoint-picker"
# Drops the library's log lines: the texts of its exceptions say the same.
logging.getLogger("kubernetes_asyncio").addHandler(logging.NullHandler())


class ApiSession:
    """Holds the connections to one API server, and the credentials."""

    def __init__(self, configuration: Any) -> None:
        configuration.connection_pool_maxsize = CONNECTIONS_MAX
        # The CAs of clusters often fail the strict X.509 checks, and no other client of Kubernetes makes these checks.
        configuration.disable_strict_ssl_verification = True
        self.host: str = configuration.host.rstrip("/")
        self._configuration = configuration
        self._rest = RESTClientObject(configuration)
        self._http: aiohttp.ClientSession = self._rest.pool_manager
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._more: dict[str, Any] = {}
        if self._rest.server_hostname:
            self._more["server_hostname"] = self._rest.server_hostname
        if self._rest.proxy:
            self._more |= {"proxy": self._rest.proxy, "proxy_headers": self._rest.proxy_headers}

    async def send(self, verb: str, url: str, headers: Mapping[str, str], body: bytes | None) -> aiohttp.ClientResponse:
        """Returns the answer with its body unread. Raises Unreachable, aiohttp.ClientError, OSError."""
        fields = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": USER_AGENT, **headers}
        try:
            token = await self._configuration.get_api_key_with_prefix("BearerToken")
        except (ConfigException, OSError) as wrong:
            raise Unreachable(f"{self.host}: the service account's token cannot be read: {wrong}") from wrong
        if token:
            fields["Authorization"] = token.strip()
        return await self._http.request(
            verb, self.host + url, headers=fields, data=body, timeout=self._timeout, allow_redirects=False, **self._more
        )

    async def close(self) -> None:
        """Closes all connections."""
        await self._rest.close()


async def open_session(files: str, environ: Mapping[str, str]) -> ApiSession:
    """Loads the credentials of the kubeconfig `files`, or of the pod's service account if `files` is "".

    Raises Unreachable if they cannot be loaded.
    """
    configuration = Configuration()
    try:
        if not files:
            load: Any = load_incluster_config  # this function has no types
            load(configuration, environ=environ)
            return ApiSession(configuration)
        before = _children()
        try:
            async with asyncio.timeout(LOAD_S_MAX):
                await kube_config.load_kube_config(files, client_configuration=configuration, persist_config=False)
        except (TimeoutError, asyncio.CancelledError):
            for plugin in _children() - before:  # the library leaves exec plugins running, so each try would add one
                with contextlib.suppress(ProcessLookupError):
                    os.kill(plugin, signal.SIGKILL)
            raise
        try:
            return ApiSession(configuration)
        finally:
            kube_config._cleanup_temp_files()  # keys inside a kubeconfig were written to files for TLS to read
    except TimeoutError as late:
        raise Unreachable(f"{files}: the exec plugin did not end within {LOAD_S_MAX:g} s") from late
    except (ConfigException, yaml.YAMLError, OSError, ssl.SSLError, ValueError, TypeError, KeyError, AssertionError) as bad:
        invalid = " is not a kubeconfig" if files and not isinstance(bad, ConfigException | OSError) else ""
        raise Unreachable(f"{files or 'the service account'}{invalid}: {bad or type(bad).__name__}") from bad


def _children() -> set[int]:
    """Returns the process ids of this process's children. The set is empty if the kernel lists no children."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listed:
            return {int(pid) for pid in listed.read().split()}
    except OSError:
        return set()
