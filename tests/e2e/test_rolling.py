"""Rolling replacement of pickers under load through a real Envoy. No request fails.

This is a Kubernetes Service with two pods: Envoy knows both addresses and checks the health of both. The test starts the new picker, and
sends SIGTERM to the old one when the new one is healthy. Requests are streamed answers of about 300 ms, so that some are always open.
"""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import aiohttp

from loadtest.demo import envoy_config
from loadtest.demo.children import Child
from loadtest.demo.ports import free_ports
from loadtest.demo.stack import LOOPBACK, envoy_command, envoy_path, get, picker_config
from tests.e2e.cluster import COMPLETIONS, MODEL, Cluster, Fleet, Picker, completion, serve

ROLLS = 3
CLIENTS = 12
TOKENS = 10
ENVOY_THREADS = 2
WORKERS = 2
HEALTHY_S = 20.0
END_S = 20.0
CHECK_EVERY = "0.1s"


def two_pickers(config: dict[str, Any], places: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Changes the bootstrap: adds both pickers to the picker's cluster, with health checks on their health ports."""
    clusters = config["static_resources"]["clusters"]
    cluster = next(c for c in clusters if c["name"] == envoy_config.PICKER_CLUSTER)
    cluster["health_checks"] = [
        {
            "timeout": "1s",
            "interval": CHECK_EVERY,
            "no_traffic_interval": CHECK_EVERY,
            "unhealthy_threshold": 1,
            "healthy_threshold": 1,
            "grpc_health_check": {"service_name": "envoy.service.ext_proc.v3.ExternalProcessor"},
        }
    ]
    cluster["common_lb_config"] = {"healthy_panic_threshold": {"value": 0}}
    cluster["load_assignment"]["endpoints"] = [
        {
            "lb_endpoints": [
                {
                    "endpoint": {
                        "address": {"socket_address": {"address": LOOPBACK, "port_value": grpc}},
                        "health_check_config": {"port_value": health},
                    }
                }
                for grpc, health, _ in places
            ]
        }
    ]
    return config


class Rolling:
    """Holds two addresses for a picker, an Envoy that knows both, and the load."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.fleet: Fleet = cluster.fleet(4, "--prefill-us-per-token", "1", "--decode-ms", "30", "--model", MODEL)
        self.config = cluster.directory / "rolling.yaml"
        self.config.write_text(picker_config(self.fleet.file))
        self.port, self.admin, *ports = free_ports(8)
        self.places = (ports[:3], ports[3:])
        self.statuses: Counter[int | str] = Counter()
        self.first_failure = ""
        self.stop = False
        self.started = 0

    def envoy(self) -> Child:
        config = envoy_config.bootstrap(listen=(LOOPBACK, self.port), picker=(LOOPBACK, self.places[0][0]), admin=(LOOPBACK, self.admin))
        file = self.cluster.directory / "envoy-rolling.yaml"
        file.write_text(envoy_config.to_yaml(two_pickers(config, self.places)))
        return self.cluster.children.start("envoy", envoy_command(envoy_path(), file, ENVOY_THREADS))

    def picker(self, place: int) -> Picker:
        self.started += 1
        grpc, health, metrics = self.places[place]
        argv = serve(self.config, grpc, health, metrics, WORKERS, self.cluster.directory / "run")
        child = self.cluster.children.start(f"picker {self.started}", argv)
        return Picker(child, grpc, health, metrics)

    def healthy(self, picker: Picker) -> bool:
        page = get(self.admin, "/clusters") or b""
        line = f"{envoy_config.PICKER_CLUSTER}::{LOOPBACK}:{picker.grpc}::health_flags::healthy"
        return line in page.decode().splitlines()

    async def client(self, session: aiohttp.ClientSession, number: int) -> None:
        count = 0
        while not self.stop:
            count += 1
            body = completion(f"{number} {count} rolling " * 10, max_tokens=TOKENS, stream=True)
            try:
                async with session.post(f"http://{LOOPBACK}:{self.port}{COMPLETIONS}", data=body) as response:
                    whole = await response.read()
                    complete = whole.endswith(b"data: [DONE]\n\n")
                    self.statuses[response.status if complete or response.status != 200 else "cut"] += 1
                    if response.status != 200 and not self.first_failure:
                        self.first_failure = f"{time.monotonic()}: {whole[:500]!r}"
            except aiohttp.ClientError as failed:
                self.statuses[type(failed).__name__] += 1

    async def rolled(self, old: Picker, place: int) -> Picker:
        """Replaces the old picker. Returns the new one after the old one has exited."""
        new = self.picker(place)
        async with asyncio.timeout(HEALTHY_S):
            while not self.healthy(new):
                self.cluster.children.check()
                await asyncio.sleep(0.02)
        old.child.signal(signal.SIGTERM)
        signalled = time.monotonic()
        code = await asyncio.to_thread(old.child.process.wait, END_S)
        print(f"picker on port {old.grpc} left {time.monotonic() - signalled:.2f} s after SIGTERM at {signalled:.2f} with exit code {code}")
        assert code == 0, old.child.tail()
        self.cluster.forget(old.child)
        return new


def test_no_request_fails_while_pickers_are_replaced_under_load(cluster: Cluster) -> None:
    rolling = Rolling(cluster)
    picker = rolling.picker(0)
    cluster.wait(picker.child, picker.ready)
    cluster.wait(rolling.envoy(), lambda: rolling.healthy(picker))

    async def story() -> None:
        current = picker
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            clients = [asyncio.create_task(rolling.client(session, n)) for n in range(CLIENTS)]
            await asyncio.sleep(0.5)
            for roll in range(1, ROLLS + 1):
                current = await rolling.rolled(current, roll % 2)
            rolling.stop = True
            await asyncio.gather(*clients)

    asyncio.run(story())
    print(f"{ROLLS} rolls: {dict(rolling.statuses)}")
    assert set(rolling.statuses) == {200}, f"{rolling.statuses}, first {rolling.first_failure}"
    assert rolling.statuses[200] > 20 * ROLLS
