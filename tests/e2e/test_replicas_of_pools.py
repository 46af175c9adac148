"""Pickers of several pools that share what they know through a real redis-server: by pool, whatever other pools each of them has."""

import asyncio
import itertools
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from loadtest.demo.ports import free_ports
from tests.e2e.cluster import COMPLETIONS, Answer, Cluster, Fleet, Picker, ask, ask_all, completion, eventually
from tests.e2e.conftest import FAST
from tests.e2e.echo import gateway
from tests.e2e.replica_site import Remote, know_each_other, store_in
from tests.e2e.test_warm import END_S, Traffic
from tests.redis_server import RedisServer, needs_redis

pytestmark = needs_redis

CONFIG = """
featureGates: [flowControl]
plugins: [{type: prefix-cache-scorer}]  # load would draw some requests away
tenants:
  from: [{header: x-tenant, trusted: true}]
  unknown: share
  perTenant: {acme: {budget: {tokensPerMinute: 1, burst: 300}}}
"""


class Site:
    """Pickers with some of the pools in different orders, one store, and an Envoy for each pool of each picker."""

    def __init__(self, cluster: Cluster, store: RedisServer) -> None:
        self.cluster = cluster
        self.store = store
        self.fleets: dict[str, Fleet] = {name: cluster.fleet(2, *FAST) for name in ("one", "two", "three")}
        self.pickers: list[Picker] = []
        self.remotes: list[Remote] = []
        self.ports: list[dict[str, int]] = []

    def begin(self, *names: str) -> None:
        """Starts another picker with these pools, after which all know each other."""
        run_dir = self.cluster.directory / "run"
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        pools = [
            {"name": name, "port": ports[name], "config": CONFIG, "endpoints": [f"{h}:{p}" for h, p in self.fleets[name].addresses]}
            for name in names
        ]
        flags = (f"--replica-store={self.store.url}", f"--replica-name=replica-{len(self.pickers)}")
        text = json.dumps({"pools": pools})
        picker = self.cluster.picker(self.cluster.directory, *flags, workers=1, run_dir=run_dir, pools_text=text)
        self.pickers.append(picker)
        self.remotes.append(Remote(run_dir, picker))
        self.ports.append({name: gateway(self.cluster, port) for name, port in ports.items()})
        assert eventually(lambda: know_each_other(self.remotes, len(self.remotes)), 60.0)

    def end(self) -> None:
        """Ends the last picker."""
        picker = self.pickers.pop()
        self.remotes.pop()
        self.ports.pop()
        picker.child.signal(signal.SIGTERM)
        assert picker.child.process.wait(END_S) == 0
        self.cluster.forget(picker.child)
        assert eventually(lambda: know_each_other(self.remotes, len(self.remotes)), 60.0)

    def shares(self, pool: str, generation: str) -> bool:
        """Sends prompts to the first picker, then to the second one. Returns whether the second one finds them cached."""
        asyncio.run(Traffic(self.ports[0][pool], generation).warm())
        return asyncio.run(Traffic(self.ports[1][pool], generation).round()) > 0.8

    def ask(self, picker: int, pool: str, tenant: str = "other") -> Answer:
        return ask(self.ports[picker][pool], COMPLETIONS, completion("x" * 200, max_tokens=1), {"x-tenant": tenant})


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Cluster() as cluster, store_in(cluster) as store:
        made = Site(cluster, store)
        made.begin("one", "two")
        made.begin("three", "two", "one")
        yield made


def test_a_prompt_finds_the_server_that_another_picker_has_sent_it_to(site: Site) -> None:
    for pool in ("one", "two"):
        warm = asyncio.run(Traffic(site.ports[0][pool], f"shared {pool}").warm())
        elsewhere = asyncio.run(Traffic(site.ports[1][pool], f"shared {pool}").round())
        print(f"pool {pool}: hit ratio {warm:.3f} at one picker, then {elsewhere:.3f} at the other")
        assert elsewhere > 0.9 * warm > 0.8


def test_load_is_counted_at_the_endpoints_of_its_pool(site: Site) -> None:
    async def held() -> tuple[int, int]:
        bodies = [completion(f"load {number}", max_tokens=400, stream=True) for number in range(6)]
        asking = asyncio.ensure_future(ask_all(site.ports[1]["three"], COMPLETIONS, bodies))
        bodies = [completion(f"load {number}", max_tokens=400, stream=True) for number in range(8)]
        others = asyncio.ensure_future(ask_all(site.ports[1]["two"], COMPLETIONS, bodies))
        most = 0
        while not (asking.done() and others.done()):
            await asyncio.sleep(0.01)  # the most that was seen counts
            most = max(most, site.remotes[0].requests())
        assert {answer.status for answer in (*await asking, *await others)} == {200}
        return most, site.remotes[0].least()

    most, least = asyncio.run(held())
    assert 0 < most <= 8 and least == 0, "the first picker does not know the pool three"
    assert eventually(lambda: site.remotes[0].requests() == 0)


def test_a_tenant_has_one_budget_per_pool_over_all_pickers(site: Site) -> None:
    statuses = [site.ask(0, "one", "acme").status for _ in range(12)]
    assert statuses.count(200) <= 6 and statuses[-1] == 429
    assert eventually(lambda: site.ask(1, "one", "acme").status == 429, 5.0), "the other picker knows it, under another number of the pool"
    assert site.ask(1, "two", "acme").status == 200 and site.ask(1, "one").status == 200


def test_a_picker_that_joins_gets_the_index_and_the_models_of_its_pools_and_one_that_goes_leaves_the_others_as_they_are(site: Site) -> None:
    for pool in ("one", "two"):
        asyncio.run(Traffic(site.ports[0][pool], f"joined {pool}").warm())
        bodies = [completion(f"latency {number}", max_tokens=4, stream=True) for number in range(16)]
        asyncio.run(ask_all(site.ports[0][pool], COMPLETIONS, bodies))
    site.begin("two")
    assert eventually(lambda: site.remotes[2].entries() > 0)
    assert eventually(lambda: asyncio.run(Traffic(site.ports[2]["two"], "joined two").round()) > 0.8, 20.0)
    site.end()
    assert all(site.ask(picker, pool).status == 200 for picker, ports in enumerate(site.ports) for pool in ports)


def test_a_store_that_comes_back_is_used_again_for_all_pools(site: Site) -> None:
    site.store.kill()
    assert all(site.ask(picker, pool).status == 200 for picker, ports in enumerate(site.ports) for pool in ports)
    site.store.start()
    assert eventually(lambda: know_each_other(site.remotes, 2), 60.0)
    attempts = itertools.count()
    assert eventually(lambda: site.shares("two", f"after {next(attempts)}"), 60.0)


def test_no_picker_reports_a_fault(site: Site) -> None:
    events: list[dict[str, Any]] = []
    for picker in site.pickers:
        events += [json.loads(line) for line in picker.child.text().splitlines() if line.startswith("{")]
    assert [event for event in events if event["level"] in ("error", "critical")] == []
