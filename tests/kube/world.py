"""A namespace on the shared API server for one test: its pods, the pickers that follow it, and its endpoints according to the API."""

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from loadtest.demo.children import command_name, descendants, python
from loadtest.demo.ports import free_ports
from tests.e2e.cluster import Cluster, Picker
from tests.kube.client import Kube, Object
from tests.kube.control_plane import ControlPlane
from tests.kube.objects import APP, NEEDED, NEW, Rule, allow, namespace, pod, pool, status
from tests.kube.table import Table

ACCOUNT = "picker"
PORT = 8000
CONVERGED_S = 20.0
LOOK_S = 0.002

What = tuple[str, str, int, str]  # endpoint, address, port, UID


class World:
    """The world of one test, created by the fixture `world`. Everything that it starts ends with the cluster."""

    def __init__(self, plane: ControlPlane, cluster: Cluster, space: str) -> None:
        self.plane, self.cluster, self.space = plane, cluster, space
        self.kube: Kube = plane.kube()
        self.kube.create(namespace(space))
        self.run_dir = cluster.directory / "run"
        self._numbers = iter(range(1000))

    def token(self, rules: Iterable[Rule] = NEEDED, account: str = ACCOUNT) -> str:
        """A token of a service account with these rights and no others."""
        allow(self.kube, self.space, account, rules)
        return self.kube.token(self.space, account)

    def user(self, account: str = ACCOUNT) -> str:
        """The name of a service account in the audit log."""
        return f"system:serviceaccount:{self.space}:{account}"

    def pool(self, labels: Mapping[str, str] = APP, ports: Iterable[int] = (PORT,), name: str = "pool") -> Object:
        return self.kube.create(pool(self.space, name, labels, ports))

    def pod(self, name: str, ip: str | None = None, labels: Mapping[str, str] = APP, **annotations: str) -> Object:
        """Creates a pod: ready with an address, pending without one."""
        thing = self.kube.create(pod(self.space, name, labels, **annotations))
        return thing if ip is None else self.kube.patch(thing, status(ip), status=True)

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
        """Starts a picker that follows the pool. `port`: another port of the API server. `ready`: waits until the picker is ready."""
        number = next(self._numbers)
        directory = self.cluster.directory
        kubeconfig = self.plane.kubeconfig(directory / f"kubeconfig-{number}", token or self.token(), port)
        grpc, health, metrics = free_ports(3)
        options: dict[str, Any] = {
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
            options["config-text"] = config_text
        variables = {"KUBECONFIG": str(kubeconfig), **environ}
        argv = ["env", *(f"{k}={v}" for k, v in variables.items()), *python("workers", "serve", follow)]
        argv += [*(f"--{k}={v}" for k, v in options.items()), *flags]
        picker = Picker(self.cluster.children.start(f"picker {self.space} {number}", argv), grpc, health, metrics)
        if ready:
            self.cluster.wait(picker.child, picker.ready)
        return picker

    def refuses(self, picker: Picker, *words: str) -> None:
        """Waits until the picker is not ready with these words in its reason. There may be other reasons before."""
        answer = 0, ""

        def does() -> bool:
            nonlocal answer
            picker.child.check()
            answer = page(picker.metrics, "/readyz")
            return answer[0] == 503 and all(word in answer[1] for word in words)

        try:
            until(does, f"not ready because of {words}")
        except AssertionError as failure:
            raise AssertionError(f"{failure}; the last answer is {answer}") from None

    def table(self, picker: Picker) -> Table:
        return Table(picker, self.run_dir)

    def truth(self, ports: Iterable[int] = (PORT,), labels: Mapping[str, str] = APP) -> set[What]:
        """The endpoints that the picker should have, according to the API."""
        selector = ",".join(f"{k}={v}" for k, v in labels.items())
        return {what for one in self.kube.list(pod(self.space, ""), selector) for what in endpoints_of(one, list(ports))}

    def converged(self, table: Table, begun: float = 0.0, **of: Any) -> float:
        """Waits until the table agrees with the API. Returns the seconds since `begun`, or since the call."""
        begun = begun or time.monotonic()
        deadline = time.monotonic() + CONVERGED_S
        wanted = self.truth(**of)
        while (present := {row.key for row in table.look()}) != wanted:
            assert time.monotonic() < deadline, (
                f"after {CONVERGED_S:.0f} s: unexpected {sorted(present - wanted)[:5]}, missing {sorted(wanted - present)[:5]}; "
                f"{len(present)} present, {len(wanted)} wanted"
            )
            time.sleep(LOOK_S)
        return time.monotonic() - begun


def endpoints_of(one: Object, ports: list[int]) -> list[What]:
    """The endpoints of a pod that the selector matches."""
    meta, pod_status = one["metadata"], one.get("status", {})
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in pod_status.get("conditions", ()))
    if not ready or "deletionTimestamp" in meta or not pod_status.get("podIP"):
        return []
    listed = meta.get("annotations", {}).get(f"{NEW}/active-ports")
    active = ports if listed is None else [port for port in ports if str(port) in listed.split(",")]
    return [(f"{meta['name']}-rank-{ports.index(port)}", pod_status["podIP"], port, meta["uid"]) for port in active]


def page(port: int, path: str, headers: Mapping[str, str] = {}, host: str = "127.0.0.1") -> tuple[int, str]:
    """The status and the text of a page on loopback. The status is 0 without an answer."""
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
    """The pid of a picker's supervisor."""
    (found,) = [child for child in descendants(pid) if "super" in command_name(child)]
    return found


def warnings(picker: Picker) -> list[str]:
    """The events in a picker's log so far, each with its reason. Lines that are not JSON are left out."""
    found = []
    for line in picker.child.text().splitlines():
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):  # the text begins somewhere in the log, maybe inside a line
                fields = json.loads(line)
                found.append(f"{fields.get('event', '')}: {fields.get('reason', '')}")
    return found


def until(condition: Callable[[], Any], what: str, seconds: float = CONVERGED_S) -> float:
    """Waits for a condition. Returns the seconds that it took. Fails the test, with the text `what`, if that takes too long."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, f"{what}: not within {seconds:.0f} s"
        time.sleep(LOOK_S)
    return time.monotonic() - begun
