"""A namespace of its own on the shared API server, its pods, pickers that follow it, and what is true in it by the API's word."""

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tests.e2e.cluster import Cluster, Picker
from tests.kube.client import Kube, Object
from tests.kube.control_plane import ControlPlane
from tests.kube.objects import APP, NEEDED, NEW, Rule, allow, namespace, pod, pool, status
from tests.kube.table import Table
from workers.demo.children import command_name, descendants, free_ports, python

ACCOUNT = "picker"
PORT = 8000
CONVERGED_S = 20.0
LOOK_S = 0.002

What = tuple[str, str, int, str]  # endpoint, address, port, UID


class World:
    """Made by the fixture of that name; what was started ends with the cluster."""

    def __init__(self, plane: ControlPlane, cluster: Cluster, space: str) -> None:
        self.plane, self.cluster, self.space = plane, cluster, space
        self.kube: Kube = plane.kube()
        self.kube.create(namespace(space))
        self.run_dir = cluster.directory / "run"
        self._numbers = iter(range(1000))

    def token(self, rules: Iterable[Rule] = NEEDED, account: str = ACCOUNT) -> str:
        """Of a service account that may do this and nothing else."""
        allow(self.kube, self.space, account, rules)
        return self.kube.token(self.space, account)

    def user(self, account: str = ACCOUNT) -> str:
        """How the audit log calls it."""
        return f"system:serviceaccount:{self.space}:{account}"

    def pool(self, labels: Mapping[str, str] = APP, ports: Iterable[int] = (PORT,), name: str = "pool") -> Object:
        return self.kube.create(pool(self.space, name, labels, ports))

    def pod(self, name: str, ip: str | None = None, labels: Mapping[str, str] = APP, **annotations: str) -> Object:
        """With an address it is ready, without it nothing has happened to it yet."""
        made = self.kube.create(pod(self.space, name, labels, **annotations))
        return made if ip is None else self.kube.patch(made, status(ip), status=True)

    def picker(
        self,
        *flags: str,
        ready: bool = True,
        workers: int = 1,
        port: int = 0,
        token: str = "",
        follow: str = "--pool-name=pool",
        config_text: str = "",
        environ: Mapping[str, str] = {},
    ) -> Picker:
        """Follows the pool. `port`: where it finds the API server, if not at its own port; `ready`: wait until it is."""
        number = next(self._numbers)
        directory = self.cluster.directory
        kubeconfig = self.plane.kubeconfig(directory / f"kubeconfig-{number}", token or self.token(), port)
        grpc, health, metrics = free_ports(3)
        given: dict[str, Any] = {
            "pool-namespace": self.space,
            "workers": workers,
            "grpc-port": grpc,
            "grpc-health-port": health,
            "metrics-port": metrics,
            "secure-serving": "false",
            "metrics-endpoint-auth": "false",
            "drain-timeout": "5s",
            "run-dir": self.run_dir,
        }
        if config_text:
            given["config-text"] = config_text
        ours = {"KUBECONFIG": str(kubeconfig), **environ}
        argv = ["env", *(f"{k}={v}" for k, v in ours.items()), *python("workers", "serve", follow)]
        argv += [*(f"--{k}={v}" for k, v in given.items()), *flags]
        picker = Picker(self.cluster.children.start(f"picker {self.space} {number}", argv), grpc, health, metrics)
        if ready:
            self.cluster.wait(picker.child, picker.ready)
        return picker

    def refuses(self, picker: Picker, *words: str) -> None:
        """Waits until it says that it is not ready, and why with these words: there may be other reasons before."""
        said = 0, ""

        def does() -> bool:
            nonlocal said
            picker.child.check()
            said = page(picker.metrics, "/readyz")
            return said[0] == 503 and all(word in said[1] for word in words)

        try:
            until(does, f"not ready because of {words}")
        except AssertionError as never:
            raise AssertionError(f"{never}; it says {said}") from None

    def table(self, picker: Picker) -> Table:
        return Table(picker, self.run_dir)

    def truth(self, ports: Iterable[int] = (PORT,), labels: Mapping[str, str] = APP) -> set[What]:
        """The endpoints that should be there, as this test reads the API."""
        selector = ",".join(f"{k}={v}" for k, v in labels.items())
        return {
            what for one in self.kube.list(pod(self.space, ""), selector) for what in endpoints_of(one, list(ports))
        }

    def converged(self, table: Table, begun: float = 0.0, **of: Any) -> float:
        """Waits until the table is what the API says; seconds since `begun`, or since the call."""
        begun = begun or time.monotonic()
        deadline = time.monotonic() + CONVERGED_S
        wanted = self.truth(**of)
        while (there := {seat.is_what for seat in table.look()}) != wanted:
            assert time.monotonic() < deadline, (
                f"after {CONVERGED_S:.0f} s: too many {sorted(there - wanted)[:5]}, missing {sorted(wanted - there)[:5]}; "
                f"{len(there)} there, {len(wanted)} wanted"
            )
            time.sleep(LOOK_S)
        return time.monotonic() - begun


def endpoints_of(one: Object, ports: list[int]) -> list[What]:
    """The endpoints of a pod that matches."""
    meta, said = one["metadata"], one.get("status", {})
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in said.get("conditions", ()))
    if not ready or "deletionTimestamp" in meta or not said.get("podIP"):
        return []
    listed = meta.get("annotations", {}).get(f"{NEW}/active-ports")
    active = ports if listed is None else [port for port in ports if str(port) in listed.split(",")]
    return [(f"{meta['name']}-rank-{ports.index(port)}", said["podIP"], port, meta["uid"]) for port in active]


def page(port: int, path: str, headers: Mapping[str, str] = {}, host: str = "127.0.0.1") -> tuple[int, str]:
    """A page of loopback, whatever its status; 0 where nobody answers."""
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", path, headers=dict(headers))
        response = connection.getresponse()
        return response.status, response.read().decode()
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


def supervisor_of(pid: int) -> int:
    """The picker's child that follows the API."""
    (found,) = [child for child in descendants(pid) if "super" in command_name(child)]
    return found


def warnings(picker: Picker) -> list[str]:
    """What its log has said so far, one event each; what is no JSON is left out."""
    found = []
    for line in picker.child.text().splitlines():
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):  # the log is looked at from somewhere in its middle
                found.append(str(json.loads(line).get("event", "")))
    return found


def until(condition: Callable[[], Any], what: str, seconds: float = CONVERGED_S) -> float:
    """Waits for it; how long that took. What never comes true fails the test, named by `what`."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, f"{what}: not after {seconds:.0f} s"
        time.sleep(LOOK_S)
    return time.monotonic() - begun
