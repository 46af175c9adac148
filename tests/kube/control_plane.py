"""etcd and kube-apiserver as processes on loopback: a cluster without nodes. The tests set the status of the pods.

    etcd ◀── kube-apiserver :port          kill, stop, restart, compact
         ◀── a second kube-apiserver       changes objects while the first one is away

Nothing runs in the cluster: there are no controllers, no scheduler and no kubelet. Service accounts get their tokens by TokenRequest, and
namespaces are never removed. RBAC is on; the token `tok` has all rights. The server writes every request to an audit log, one JSON line
each, with the client, the request and the status of the answer.
"""

import asyncio
import base64
import contextlib
import http.client
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from loadtest.demo.children import Child, Children
from loadtest.demo.ports import free_ports
from tests.kube.binaries import SERVER, etcd, provide_binaries
from tests.kube.client import Kube

TOKEN = "tok"
LOOPBACK = "127.0.0.1"
READY_S = 90.0
AUDIT = """apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: None, users: ["system:apiserver"]}
- {level: Metadata}
"""
FEATURES_OFF = (
    "ServiceAccount",  # no controller creates the default accounts of namespaces
    "DefaultTolerationSeconds",
)


class AuditEntry(NamedTuple):
    """One request in the audit log."""

    user: str
    verb: str
    uri: str
    code: int
    resource: str  # "" for a request without a resource, such as the version


class ControlPlane:
    """The cluster. `start` starts it; `children` ends it."""

    def __init__(self, children: Children, directory: Path, port: int = 0) -> None:
        provide_binaries()
        self.children = children
        self.directory = directory
        ports = free_ports(4)
        self.port = port or ports[0]
        self._second_port, self._etcd_port, self._peer_port = ports[1:]
        self.certificates = directory / "certificates"
        self.audit = directory / "audit.log"
        self._started = 0
        self._kubes: list[Kube] = []
        self._server: Child
        self._prepare()

    def start(self) -> Self:
        """Starts both processes and waits until they are ready."""
        self._start_etcd()
        self._server = self._start_server(self.port, "kube-apiserver")
        self._wait(self._server, self.port)
        return self

    @property
    def authority(self) -> Path:
        """The certificate to trust. The server creates it at its first start."""
        return self.certificates / "apiserver.crt"

    def kube(self, token: str = TOKEN, port: int = 0) -> Kube:
        """A new client. `close` closes it."""
        kube = Kube(LOOPBACK, port or self.port, token, self.authority)
        self._kubes.append(kube)
        return kube

    def close(self) -> None:
        """Closes the connections of all clients."""
        for kube in self._kubes:
            kube.close()

    def kubeconfig(self, to: Path, token: str = TOKEN, port: int = 0) -> Path:
        """Writes a file for KUBECONFIG. Returns its path."""
        server = {"server": f"https://{LOOPBACK}:{port or self.port}", "certificate-authority": str(self.authority)}
        to.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "test", "cluster": server}],
                    "users": [{"name": "test", "user": {"token": token}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                    "current-context": "test",
                }
            )
        )
        return to

    def kill(self) -> None:
        """Kills the API server. etcd stays."""
        self._end(self._server, signal.SIGKILL)

    def stop(self) -> None:
        """Ends the API server in order, so that it closes its watches."""
        self._end(self._server, signal.SIGTERM)

    def restart(self) -> None:
        """Starts the API server on its port again and waits until it is ready."""
        self._server = self._start_server(self.port, f"kube-apiserver again {self._started}")
        self._wait(self._server, self.port)

    def second(self) -> tuple[Kube, Child]:
        """Starts another API server on the same etcd, for changes that clients of the first one do not see."""
        child = self._start_server(self._second_port, f"kube-apiserver beside {self._started}")
        self._wait(child, self._second_port)
        return self.kube(port=self._second_port), child

    def end(self, child: Child) -> None:
        """Kills a second server."""
        self._end(child, signal.SIGKILL)

    def compact(self) -> int:
        """Drops all history up to now. Returns the revision that is kept."""
        nothing = base64.b64encode(b"\0").decode()
        revision = int(self._etcd("/v3/kv/range", {"key": nothing})["header"]["revision"])
        self._etcd("/v3/kv/compaction", {"revision": str(revision), "physical": True})
        return revision

    def requests(self, since: int = 0) -> Iterator[AuditEntry]:
        """The entries of the audit log from a position on (`audited`). The last lines may be a moment late."""
        with self.audit.open("rb") as log:
            log.seek(since)
            for line in log:
                if line.endswith(b"\n"):
                    event: dict[str, Any] = json.loads(line)
                    code = event.get("responseStatus", {}).get("code", 0)
                    resource = event.get("objectRef", {}).get("resource", "")
                    yield AuditEntry(event["user"]["username"], event["verb"], event["requestURI"], code, resource)

    def audited(self) -> int:
        """The present length of the audit log in bytes."""
        return self.audit.stat().st_size

    def _prepare(self) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        shape = Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()
        (self.directory / "sa.key").write_bytes(key.private_bytes(*shape))
        (self.directory / "tokens.csv").write_text(f"{TOKEN},admin,1,system:masters\n")
        (self.directory / "audit.yaml").write_text(AUDIT)

    def _start_etcd(self) -> None:
        binary = etcd()
        assert binary is not None
        client, peer = (f"http://{LOOPBACK}:{port}" for port in (self._etcd_port, self._peer_port))
        flags = {
            "data-dir": self.directory / "data",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "logger": "zap",
            "log-level": "error",
            "snapshot-count": 10000,
        }
        child = self.children.start("etcd", [str(binary), *(f"--{k}={v}" for k, v in flags.items())])
        asyncio.run(self.children.ready(child, lambda: _is_ok(self._etcd_port, "/health"), READY_S))

    def _start_server(self, port: int, name: str) -> Child:
        self._started += 1
        flags = {
            "etcd-servers": f"http://{LOOPBACK}:{self._etcd_port}",
            "etcd-compaction-interval": "0",
            "service-account-key-file": self.directory / "sa.key",
            "service-account-signing-key-file": self.directory / "sa.key",
            "service-account-issuer": "https://kubernetes.default.svc",
            "token-auth-file": self.directory / "tokens.csv",
            "authorization-mode": "RBAC",
            "secure-port": port,
            "bind-address": LOOPBACK,
            "cert-dir": self.certificates,
            "service-cluster-ip-range": "10.0.0.0/24",
            "disable-admission-plugins": ",".join(FEATURES_OFF),
            "audit-policy-file": self.directory / "audit.yaml",
            "audit-log-path": self.audit,
            "audit-log-mode": "blocking",
            "profiling": "false",
        }
        return self.children.start(name, [str(SERVER), *(f"--{k}={v}" for k, v in flags.items())])

    def _wait(self, child: Child, port: int) -> None:
        def ready() -> bool:
            if not self.authority.exists():
                return False
            with contextlib.closing(Kube(LOOPBACK, port, TOKEN, self.authority)) as kube:
                return kube.is_ready()

        asyncio.run(self.children.ready(child, ready, READY_S))

    def _end(self, child: Child, number: int) -> None:
        child.signal(number)
        child.process.wait(READY_S)
        self.children.all.remove(child)

    def _etcd(self, path: str, body: dict[str, Any]) -> Any:
        connection = http.client.HTTPConnection(LOOPBACK, self._etcd_port, timeout=10)
        try:
            connection.request("POST", path, json.dumps(body))
            response = connection.getresponse()
            answer = response.read()
            assert response.status == 200, answer
            return json.loads(answer)
        finally:
            connection.close()


def _is_ok(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=1)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
