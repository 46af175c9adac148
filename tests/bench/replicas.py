"""Replicas that act as one picker, with real processes: `python -m tests.bench.replicas [--smoke] [--only NAME ...] [--json]`.

Three pickers with a redis-server on loopback, behind one Envoy that spreads requests over them at random, and simulated servers. Each
part is compared with three pickers that share nothing.

in flight: the time from sending a request to one replica until another one counts it, by looking into its shared memory.
burst: 200 requests at once; the requests of the busiest server divided by the mean of all servers.
hits: conversations; the share of the prompt tokens that servers had cached, compared with one picker.
joining: the time from the readiness of a third replica until its prefix index has what those of the others have.
limits: three times as many requests within 1.5 s as may wait; those that were not refused, as a share above what may wait and be served.
fairness, priorities: `tests.bench.replica_order`.
cost: CPU time of all processes of the replicas and of the store, per request, at a fixed rate of requests of 8 KB; bytes of the store.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from loadtest.demo.children import cpu_seconds, python
from loadtest.demo.stack import picker_config
from loadtest.load import process_group
from tests.bench.replica_order import fairness, priorities
from tests.e2e.cluster import CHAT, LOOPBACK, MODEL, Cluster, Picker, ask_all, completion, eventually
from tests.e2e.replica_site import Remote, ReplicaSite, know_each_other, store_in
from tests.faults.client import REQUESTS, Connection
from tests.redis_server import RedisServer

REPLICAS = 3
SERVERS = 8
MARKS, SMOKE_MARKS = 300, 20
BURST = 200
CONVERSATIONS, SMOKE_CONVERSATIONS = 48, 4
TURNS = 6
WARM = 0.97  # of the entries of another replica
AT_ONCE = 6
LIMITED_SERVERS, SERVED_AT_ONCE, WAITING_MAX = 4, 4, 100
RATE, SMOKE_RATE = 300, 60  # requests per second of each replica
COST_S, SMOKE_COST_S = 12.0, 2.0
TARGETS = {
    "in flight p99 ms": 20.0,
    "burst max/mean": 1.4,
    "hits of one picker": 0.97,
    "warm after s": 5.0,
    "over the limit": 0.05,
    "Jain index, random spread": 0.95,
    "us per request": 10.0,
}

Figures = dict[str, Any]


def in_flight(smoke: bool) -> Figures:
    """Measures how soon another replica counts a request."""
    with Cluster() as cluster, store_in(cluster) as store:
        site = ReplicaSite(cluster, cluster.fleet(SERVERS), store.url, count=2)
        here, there = site.remotes()
        assert eventually(lambda: know_each_other((here, there), 2)), "the replicas do not know each other"
        took = asyncio.run(_marks(site, there.requests, SMOKE_MARKS if smoke else MARKS))
    took.sort()
    at = lambda share: round(1e3 * took[min(len(took) - 1, int(share * len(took)))], 2)  # noqa: E731 - three uses
    return {"in flight p50 ms": at(0.5), "in flight p99 ms": at(0.99), "in flight max ms": at(1.0)}


async def _marks(site: ReplicaSite, seen: Callable[[], int], count: int) -> list[float]:
    rng = random.Random("marks")
    _, connection = await asyncio.get_running_loop().create_connection(Connection, LOOPBACK, site.pickers[0].grpc)
    took = []
    for number in range(count):
        before = seen()
        stream = connection.open()
        started = time.monotonic()
        stream.send(REQUESTS[number % len(REQUESTS)])
        while seen() <= before:
            await asyncio.sleep(0.0002)
        took.append(time.monotonic() - started)
        stream.cancel()
        while seen() > before:
            await asyncio.sleep(0.0002)
        await asyncio.sleep(rng.random() * 0.02)
    return took


def burst(smoke: bool) -> Figures:
    """Measures how a burst between two scrapes spreads over the servers."""
    figures = {}
    for name, shares in (("shared", True), ("apart", False)):
        with Cluster() as cluster, store_in(cluster) as store:
            fleet = cluster.fleet(SERVERS, "--decode-ms", "20")
            site = ReplicaSite(cluster, fleet, store.url if shares else "", "--refresh-metrics-interval=5s")
            assert not shares or eventually(lambda site=site: know_each_other(site.remotes(), REPLICAS))  # type: ignore[misc]
            rng = random.Random("burst")
            bodies = [completion(rng.randbytes(200).hex(), max_tokens=200) for _ in range(BURST // (4 if smoke else 1))]
            answers = asyncio.run(ask_all(site.port, "/v1/completions", bodies, within_s=0.25))
            requests = fleet.requests()
            assert {answer.status for answer in answers} == {200}
            figures[name] = round(max(requests) * len(requests) / sum(requests), 3)
    return {"burst max/mean": figures["shared"], "burst max/mean, apart": figures["apart"]}


def hits(smoke: bool) -> Figures:
    """Measures the share of cached prompt tokens of one picker, of three that share, and of three that do not."""
    shares = {
        "one": _cached(smoke, 1, shared=False),
        "shared": _cached(smoke, REPLICAS, shared=True),
        "apart": _cached(smoke, REPLICAS, shared=False),
    }
    return {
        **{f"cached, {name}": round(share, 4) for name, share in shares.items()},
        "hits of one picker": round(shares["shared"] / shares["one"], 4),
        "hits of one picker, apart": round(shares["apart"] / shares["one"], 4),
    }


def _cached(smoke: bool, count: int, *, shared: bool) -> float:
    with Cluster() as cluster, store_in(cluster) as store:
        fleet = cluster.fleet(SERVERS, "--prefill-us-per-token", "20", "--decode-ms", "2")
        site = ReplicaSite(cluster, fleet, store.url if shared else "", count=count)
        assert not shared or eventually(lambda: know_each_other(site.remotes(), count))
        asyncio.run(_conversations(site.port, SMOKE_CONVERSATIONS if smoke else CONVERSATIONS))
        stats = fleet.stats()
    return float(sum(s["cached_tokens"] for s in stats) / sum(s["prompt_tokens"] for s in stats))


async def _conversations(port: int, count: int) -> None:
    """Runs the same conversations each time: the answers in the prompts are given, so they do not depend on servers."""
    rng = random.Random("conversations")
    systems = [rng.randbytes(2000).hex() for _ in range(4)]
    scripts = [(rng.choice(systems), [rng.randbytes(rng.randint(100, 600)).hex() for _ in range(TURNS)]) for _ in range(count)]
    left = iter(scripts)

    async def user(session: aiohttp.ClientSession) -> None:
        for system, texts in left:
            messages = [{"role": "system", "content": system}]
            for text in texts:
                messages.append({"role": "user", "content": text})
                body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 4}).encode()
                async with session.post(f"http://{LOOPBACK}:{port}{CHAT}", data=body) as response:
                    assert response.status == 200, await response.text()
                    await response.read()
                messages.append({"role": "assistant", "content": text[:100]})
                await asyncio.sleep(0.05)  # a user who reads

    async with aiohttp.ClientSession(headers={"content-type": "application/json"}) as session:
        await asyncio.gather(*(user(session) for _ in range(AT_ONCE)))


def joining(smoke: bool) -> Figures:
    """Measures how soon a replica that starts while others serve has their prefix index."""
    with Cluster() as cluster, store_in(cluster) as store:
        site = ReplicaSite(cluster, cluster.fleet(SERVERS, "--prefill-us-per-token", "20"), store.url, count=2)
        assert eventually(lambda: know_each_other(site.remotes(), 2))
        asyncio.run(_conversations(site.port, SMOKE_CONVERSATIONS if smoke else CONVERSATIONS))
        here = Remote(site.run_dir, site.pickers[0])
        entries = here.entries()
        joined = Remote(site.run_dir, site.start(2))
        ready = time.monotonic()
        assert eventually(lambda: joined.entries() >= WARM * entries), f"{joined.entries()} of {entries} entries"
        return {"warm after s": round(time.monotonic() - ready, 2), "entries of the others": entries}


def limits(smoke: bool) -> Figures:
    """Measures how many requests three replicas let wait together, beyond the limit of flow control."""
    figures = {}
    for name, shares in (("shared", True), ("apart", False)):
        with Cluster() as cluster, store_in(cluster) as store:
            fleet = cluster.fleet(LIMITED_SERVERS, "--decode-ms", "20")
            site = ReplicaSite(cluster, fleet, store.url if shares else "", config_text=limited(fleet.file))
            assert not shares or eventually(lambda site=site: know_each_other(site.remotes(), REPLICAS))  # type: ignore[misc]
            bodies = [completion(f"prompt {number} " * 20, max_tokens=150) for number in range(3 * WAITING_MAX)]
            answers = asyncio.run(ask_all(site.port, "/v1/completions", bodies, within_s=1.5))
            statuses = Counter(answer.status for answer in answers)
            assert set(statuses) <= {200, 429}, statuses
            figures[name] = round(statuses[200] / (WAITING_MAX + LIMITED_SERVERS * SERVED_AT_ONCE) - 1, 3)
    return {"over the limit": figures["shared"], "over the limit, apart": figures["apart"]}


def limited(endpoints: Path) -> str:
    """Returns a configuration in which few requests are served and WAITING_MAX may wait."""
    document = yaml.safe_load(picker_config(endpoints))
    plugins = [plugin for plugin in document["plugins"] if plugin["type"] != "utilization-detector"]
    detector = {"type": "concurrency-detector", "parameters": {"maxConcurrency": SERVED_AT_ONCE}}
    flow = {"maxRequests": WAITING_MAX, "saturationDetector": {"pluginRef": "concurrency-detector"}}
    document |= {"plugins": [*plugins, detector], "flowControl": document["flowControl"] | flow}
    return yaml.safe_dump(document, sort_keys=False)


def cost(smoke: bool) -> Figures:
    """Measures CPU time and bytes at a fixed rate, with a store and without."""
    seconds, rate = (SMOKE_COST_S, SMOKE_RATE) if smoke else (COST_S, RATE)
    with Cluster() as cluster, store_in(cluster) as store:
        fleet = cluster.fleet(SERVERS)
        shared, apart = ReplicaSite(cluster, fleet, store.url), ReplicaSite(cluster, fleet, "")
        assert eventually(lambda: know_each_other(shared.remotes(), REPLICAS))
        spent: dict[str, list[float]] = {"shared": [], "apart": []}
        stored, moved, requests = 0.0, 0, 0
        for turn in range(1 if smoke else 3):  # in turns, because the machine is not the same all the time
            for name, site in (("shared", shared), ("apart", apart))[:: 1 if turn % 2 else -1]:
                cpu, network = cpu_seconds(store.pid), _network(store)
                before, done = sum(map(_group, site.pickers)), _drive(site, seconds, rate)
                spent[name].append((sum(map(_group, site.pickers)) - before) / done)
                if name == "shared":
                    stored, moved, requests = (stored + cpu_seconds(store.pid) - cpu, moved + _network(store) - network, requests + done)
    store_us, time_s = 1e6 * stored / requests, requests / (REPLICAS * rate)
    extra = 1e6 * (sum(spent["shared"]) - sum(spent["apart"])) / len(spent["shared"])
    return {
        "requests per second": REPLICAS * rate,
        "us per request": round(extra + store_us, 1),
        "us per request, of the store": round(store_us, 2),
        "us per request, whole picker without a store": round(1e6 * sum(spent["apart"]) / len(spent["apart"]), 1),
        "store's share of a core": round(stored / time_s, 4),
        "MB/s of the store": round(moved / time_s / 1e6, 3),
    }


def _drive(site: ReplicaSite, seconds: float, rate: int) -> int:
    """Sends requests to all replicas at the same time. Returns how many were answered."""
    options = ("--case", "chat-8k", "--rate", str(rate), "--seconds", str(seconds), "--warm-up", "0.1", "--json")
    drivers = [
        subprocess.Popen(
            python("loadtest.load.driver", "--target", f"{LOOPBACK}:{picker.grpc}", *options), stdout=subprocess.PIPE, text=True
        )
        for picker in site.pickers
    ]
    outputs = [json.loads(driver.communicate()[0]) for driver in drivers]
    assert all(set(output["endings"]) == {"ok"} for output in outputs), outputs
    return sum(output["endings"]["ok"] for output in outputs)


def _group(picker: Picker) -> float:
    return sum(process_group.cpu_seconds(picker.child.pid).values())


def _network(store: RedisServer) -> int:
    lines = store.command("INFO", "stats").decode().split("\r\n")
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(values["total_net_input_bytes"]) + int(values["total_net_output_bytes"])


PARTS: dict[str, Callable[[bool], Figures]] = {
    "in-flight": in_flight,
    "burst": burst,
    "hits": hits,
    "joining": joining,
    "limits": limits,
    "fairness": fairness,
    "priorities": priorities,
    "cost": cost,
}


def main(arguments: Sequence[str] | None = None) -> int:
    line = argparse.ArgumentParser(prog="replicas", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--smoke", action="store_true", help="each part once, in short, to check that it works")
    line.add_argument("--only", nargs="*", default=list(PARTS), choices=PARTS, help="only these parts")
    line.add_argument("--json", action="store_true", help="print one JSON object")
    options = line.parse_args(arguments)
    figures: Figures = {}
    for name in options.only:
        measured = PARTS[name](options.smoke)
        figures |= measured
        if not options.json:
            for title, value in measured.items():
                print(f"{title:48} {value:>10}" + (f"   target {TARGETS[title]:g}" if title in TARGETS else ""), flush=True)
    if options.json:
        json.dump(figures, sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
