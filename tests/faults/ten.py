"""Ten faults at once in a running picker, its servers and its gateway: `epp doctor` and the page's findings must name each.

    python -m tests.faults.ten           exit status 0: each fault is named, with evidence and a fix
    python -m tests.faults.ten --hold    keeps the faults and prints how to look at them, until Ctrl-C: find all ten

FAULTS says which finding names which fault. `docs/doctor.md` explains the findings.
"""

import argparse
import contextlib
import email.utils
import json
import re
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import yaml

from loadtest.demo.children import python
from loadtest.demo.stack import get, picker_config
from tests.e2e.cluster import COMPLETIONS, LOOPBACK, Cluster, Picker, ask, completion, eventually, run
from tests.e2e.filters import narrowed

FAULTS: Final[Mapping[str, str]] = {
    "endpoints-down": "a server was killed",
    "endpoints-stale": "a server needs three seconds for its metrics page",
    "missing-metrics": "a server has a metrics page without the families of its engine",
    "block-sizes": "a server has other KV blocks than the rest",
    "prefix-caching-off": "a server runs without prefix caching",
    "clock": "the clock of a server is an hour behind",
    "hot-flow": "one tenant fills the queue",
    "subset": "a subset filter of a gateway names no endpoint of the pool",
    "reload": "a configuration was refused",
    "gateway-frames": "a gateway has no max_outbound_frames",
}
BEYOND: Final = frozenset({"prefix-caching-off", "clock", "gateway-frames"})  # what the picker itself cannot see
HOT: Final = "tenant <script>"
HOT_REQUESTS: Final = 24
OTHERS: Final = 4
WRONG_S: Final = 3600
NAMED_S: Final = 30.0
SLOW_S: Final = 3.0
FLOW: Final = {
    "featureGates": ["flowControl"],
    "plugins": [
        {"type": "queue-scorer"},
        {"type": "prefix-cache-scorer"},
        {"type": "kv-cache-utilization-scorer"},
        {"type": "round-robin-fairness-policy"},
        {"type": "utilization-detector", "parameters": {"queueDepthThreshold": 1}},
    ],
    "schedulingProfiles": [
        {
            "name": "default",
            "plugins": [
                {"pluginRef": "queue-scorer"},
                {"pluginRef": "prefix-cache-scorer", "weight": 2},
                {"pluginRef": "kv-cache-utilization-scorer"},
            ],
        }
    ],
    "flowControl": {
        "saturationDetector": {"pluginRef": "utilization-detector"},
        "defaultPriorityBand": {"fairnessPolicyRef": "round-robin-fairness-policy"},
    },
}


class OddServer:
    """A server that shows the metrics page of another server, changed, with a wrong clock. Its answers have no text."""

    def __init__(self, copied_port: int, change: Callable[[str], str], behind_s: float = 0.0) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(change((get(copied_port, "/metrics") or b"").decode()).encode())

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", "0")))
                self._answer(b'{"choices":[]}')

            def _answer(self, body: bytes) -> None:
                self.send_response_only(200)
                self.send_header("Date", email.utils.formatdate(time.time() - behind_s, usegmt=True))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def without_families(page: str) -> str:
    return re.sub(r"^.*vllm:.*\n", "", page, flags=re.MULTILINE)


def without_caching(page: str) -> str:
    return page.replace('enable_prefix_caching="True"', 'enable_prefix_caching="False"')


def without_frames(text: str) -> str:
    """Removes the limits of frames from a configuration of Envoy."""
    return re.sub(r"^ *max_outbound_\w+: \d+\n", "", text, flags=re.MULTILINE)


class Ten:
    """A cluster with all ten faults. `entries`: further endpoints, as in an endpoints file."""

    def __init__(self, cluster: Cluster, entries: Sequence[Mapping[str, str]] = ()) -> None:
        self.cluster = cluster
        self._entries = entries
        self._odd: list[OddServer] = []
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.picker: Picker
        self.gateway = 0
        self.gateway_file: Path

    def start(self) -> None:
        """Starts everything and makes the faults. Call `close` at the end."""
        cluster = self.cluster
        slow = ("--max-running=1", "--decode-ms=50")
        fleet, other = cluster.fleet(3, "--block-size=16", *slow), cluster.fleet(1, "--block-size=32", *slow)
        copied = fleet.addresses[2][1]
        self._odd = [OddServer(copied, without_families), OddServer(copied, without_caching, WRONG_S)]
        addresses = [*fleet.addresses, *other.addresses, *((LOOPBACK, each.port) for each in self._odd)]
        names = ("killed", "slow", "healthy", "other-blocks", "no-families", "no-caching")
        rows = [{"name": n, "address": h, "port": str(p)} for n, (h, p) in zip(names, addresses, strict=True)]
        file = cluster.directory / "ten.yaml"
        file.write_text(json.dumps({"endpoints": [*rows, *self._entries]}))
        self.picker = cluster.picker(file, "--trust-client-headers=all", workers=2, config_text=picker_config(file, FLOW))
        self.gateway = cluster.envoy(self.picker, threads=1, change=self._keeping(without_frames))
        hidden = cluster.envoy(self.picker, threads=1, change=narrowed(["10.9.9.9:80"]))
        order(fleet.addresses[0][1], "vanish")
        order(fleet.addresses[1][1], "slow-metrics", delay=SLOW_S)
        for _ in range(3):
            ask(hidden, COMPLETIONS, completion("no endpoint for this"))
        self._refuse_a_reload()
        tenants = [HOT] * HOT_REQUESTS + [f"tenant-{number}" for number in range(OTHERS)]
        self._threads = [threading.Thread(target=self._send, args=(each,), daemon=True) for each in tenants]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends what this object has started itself. The cluster ends the rest."""
        self._stop.set()
        for odd in self._odd:
            odd.close()

    def state(self) -> Any:
        """Returns the state of the picker; {} if it does not answer."""
        return json.loads(get(self.picker.metrics, "/debug/state") or b"{}")

    def named(self) -> set[str]:
        """Returns the rules of the findings that the page shows now."""
        return {found["rule"] for found in self.state().get("findings", ())}

    def doctor(self, *flags: str) -> Any:
        """Runs `epp doctor --json` with the gateway's configuration. Returns what it prints."""
        where = (f"--run-dir={self.cluster.directory / 'run'}", f"--gateway-config={self.gateway_file}")
        done = run(python("workers", "doctor", *where, "--json", *flags))
        assert done.returncode == 1, done.stderr
        return json.loads(done.stdout)

    def _keeping(self, change: Callable[[str], str]) -> Callable[[str], str]:
        """Returns the change. It also keeps the changed text in a file for `epp doctor`."""

        def kept(text: str) -> str:
            self.gateway_file = self.cluster.directory / "gateway.yaml"
            changed = change(text)
            self.gateway_file.write_text(changed)
            return changed

        return kept

    def _refuse_a_reload(self) -> None:
        (config,) = (each for each in self.cluster.directory.glob("config-*.yaml"))
        document = yaml.safe_load(config.read_text())
        config.write_text(yaml.safe_dump(document | {"nonsense": 1}))
        self.picker.child.signal(signal.SIGHUP)

    def _send(self, tenant: str) -> None:
        """Sends requests of a tenant, one after the other, until the end."""
        while not self._stop.is_set():
            with contextlib.suppress(OSError):
                ask(self.gateway, COMPLETIONS, completion("a long story " * 20, max_tokens=40), {"x-llm-d-inference-fairness-id": tenant})
                time.sleep(0.1)


def order(port: int, kind: str, delay: float = 0.0) -> None:
    """Orders a fault of a simulated server."""
    body = json.dumps({"kind": kind, "delay": delay}).encode()
    urllib.request.urlopen(urllib.request.Request(f"http://{LOOPBACK}:{port}/sim/fault", body), timeout=5).close()


@contextlib.contextmanager
def ten_faults(entries: Sequence[Mapping[str, str]] = ()) -> Iterator[Ten]:
    """A cluster with all ten faults, which the picker has seen as far as it can."""
    with Cluster() as cluster:
        ten = Ten(cluster, entries)
        try:
            ten.start()
            seen = FAULTS.keys() - BEYOND
            eventually(lambda: seen <= ten.named(), NAMED_S)
            yield ten
        finally:
            ten.close()


def missed(ten: Ten) -> list[str]:
    """Returns which faults the doctor, and which faults the page does not name, with evidence and a fix.

    The share of a flow in the queue changes with every request, so both are asked until they name all faults at once.
    """
    whole: set[str] = set()

    def diagnosed() -> bool:
        whole.clear()
        found = ten.doctor()["findings"]
        whole.update(each["rule"] for each in found if each["title"] and each["evidence"] and each["fix"])
        return FAULTS.keys() <= whole

    eventually(diagnosed, NAMED_S)
    wrong = [f"doctor: {rule} ({why})" for rule, why in FAULTS.items() if rule not in whole]
    eventually(lambda: FAULTS.keys() <= ten.named(), NAMED_S)
    shown = ten.named()
    return wrong + [f"page: {rule} ({why})" for rule, why in FAULTS.items() if rule not in shown]


def main() -> int:
    line = argparse.ArgumentParser(prog="tests.faults.ten", description=(__doc__ or "").split("\n")[0])
    line.add_argument("--hold", action="store_true", help="keep the faults until Ctrl-C, and do not say what they are")
    options = line.parse_args()
    with ten_faults() as ten:
        if options.hold:
            print(f"page: http://{LOOPBACK}:{ten.picker.metrics}/ui", flush=True)
            print(f"doctor: epp doctor --run-dir {ten.cluster.directory / 'run'} --gateway-config {ten.gateway_file}")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
            return 0
        wrong = missed(ten)
    for each in wrong:
        print(f"WRONG  not named by the {each}")
    print(f"{len(FAULTS)} faults, {len(wrong)} not named")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
