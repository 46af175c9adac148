"""Credentials of a kubeconfig or of the pod -> an HTTP session that uses them. Imported after the fork only: it imports the client.

Loading is kubernetes_asyncio's: contexts, several files, tokens, client certificates, exec plugins, OIDC. A pod's token is
read again every minute by its own hook; everything else is loaded anew by `Api` when the server refuses it.
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

from workers.kube.api import Unreachable
from workers.kube.generated import without_models

with without_models():
    from kubernetes_asyncio.client import Configuration
    from kubernetes_asyncio.client.rest import RESTClientObject
    from kubernetes_asyncio.config import ConfigException, kube_config, load_incluster_config

LOAD_S_MAX = 30.0  # an exec plugin may ask a server of its own
CONNECT_S = 5.0
CONNECTIONS_MAX = 32
USER_AGENT = "endpoint-picker"
logging.getLogger("kubernetes_asyncio").addHandler(logging.NullHandler())  # what it says of failures, they say too


class Session:
    """Connections to one API server."""

    def __init__(self, configuration: Any) -> None:
        configuration.connection_pool_maxsize = CONNECTIONS_MAX
        # Clusters' own CAs often lack what X.509 wants of the strict; no other client of Kubernetes insists on it.
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
        """The answer, its body still to be read. Raises Unreachable, aiohttp.ClientError, OSError."""
        own = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": USER_AGENT, **headers}
        try:
            token = await self._configuration.get_api_key_with_prefix("BearerToken")
        except (ConfigException, OSError) as wrong:
            raise Unreachable(f"{self.host}: the service account's token cannot be read: {wrong}") from wrong
        if token:
            own["Authorization"] = token.strip()
        return await self._http.request(
            verb,
            self.host + url,
            headers=own,
            data=body,
            timeout=self._timeout,
            allow_redirects=False,
            **self._more,
        )

    async def close(self) -> None:
        """Drop all connections."""
        await self._rest.close()


async def open_session(files: str, environ: Mapping[str, str]) -> Session:
    """`files`: kubeconfig files, "" for the pod's own credentials. Raises Unreachable when they cannot be loaded."""
    configuration = Configuration()
    try:
        if not files:
            load: Any = load_incluster_config  # it has no types
            load(configuration, environ=environ)
            return Session(configuration)
        before = _children()
        try:
            async with asyncio.timeout(LOAD_S_MAX):
                await kube_config.load_kube_config(files, client_configuration=configuration, persist_config=False)
        except (TimeoutError, asyncio.CancelledError):
            for plugin in _children() - before:  # the client leaves it running, one more with every try
                with contextlib.suppress(ProcessLookupError):
                    os.kill(plugin, signal.SIGKILL)
            raise
        try:
            return Session(configuration)
        finally:
            kube_config._cleanup_temp_files()  # keys that stand in a kubeconfig were written to files for TLS to read
    except TimeoutError as late:
        raise Unreachable(f"{files}: the exec plugin did not end within {LOAD_S_MAX:g} s") from late
    except (
        ConfigException,
        yaml.YAMLError,
        OSError,
        ssl.SSLError,
        ValueError,
        TypeError,
        KeyError,
        AssertionError,
    ) as bad:
        is_none = "" if isinstance(bad, ConfigException | OSError) else " is no kubeconfig" if files else ""
        raise Unreachable(f"{files or 'the service account'}{is_none}: {bad or type(bad).__name__}") from bad


def _children() -> set[int]:
    """Processes of this one, where the kernel tells."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listed:
            return {int(pid) for pid in listed.read().split()}
    except OSError:
        return set()
