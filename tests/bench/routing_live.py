"""The routing benchmark in real time: simulated servers, a real picker and a real Envoy, on loopback.

The traffic is that of the virtual runs. The servers are those of `epp sim`, as the model `shared` or `slots`, or of a simulator with the
flags of llm-d-inference-sim, as the model `slots`. Times to the first token are divided by those of the oracle on that model in
virtual time, so they include what picker, gateway, simulator and load generator take on this machine. Each configuration runs in virtual
time, too, on the same model and traffic, with as many workers: the rank correlation of both orders says whether the virtual figures can be
believed.

One run says little of a configuration that does not count load: where it sends the first question about each popular document is chance,
and decides how busy the busiest server gets. With the same requests, the mean of "longest prefix" is 3 to 170 times the oracle's. So each
seed plays other requests, and the geometric means over all seeds are compared.
"""

import asyncio
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import yaml

from epp.config.load import DEFAULT_TEXT
from loadtest.demo.ports import free_ports
from loadtest.demo.stack import LOOPBACK, get, picker_config
from tests.bench.routing_run import WARM_UP, Outcome, measure
from tests.bench.routing_servers import KINDS, PREFILL_S, SERVERS, SHARED_DECODE_S, Kind, slot_settings
from tests.bench.routing_traffic import BLOCK_TOKENS, Session, Workload, paced
from tests.bench.routing_zoo import FIELD_TEXT, LINE, ORACLE, TOKENS_TEXT, configured
from tests.e2e.cluster import COMPLETIONS, MODEL, Cluster, Picker, write_endpoints

MODELS = tuple(kind for kind in KINDS if kind.name in ("shared", "slots"))
ANSWER_S = 120.0
WORKERS = 2
LETTERS = bytes(b"abcdefghijklmnopqrstuvwxyzABCDEF"[byte % 32] for byte in range(256))
REFERENCE = "reference"
ONE_PLUGIN = """\
plugins:
- type: {0}
schedulingProfiles:
- {{name: default, plugins: [{{pluginRef: {0}}}]}}
"""
ORDERED = {  # from good to bad policies, so that they have an order
    "default": DEFAULT_TEXT,
    "token weights": TOKENS_TEXT,
    "field's, own load": FIELD_TEXT,
    "least requests": ONE_PLUGIN.format("active-request-scorer"),
    "shortest queue": ONE_PLUGIN.format("queue-scorer"),
    "longest prefix": ONE_PLUGIN.format("prefix-cache-scorer"),
    "random": ONE_PLUGIN.format("random-picker"),
}


class Result(NamedTuple):
    """One request. `at`: seconds since the start; `first_s`: the time to the first token, None if the request failed."""

    at: float
    first_s: float | None


class Figures(NamedTuple):
    """One picker on one traffic: TTFT divided by the oracle's in virtual time, the TTFT in seconds, and failed requests.

    Over several runs: geometric means of what is divided by the oracle's, the mean TTFT, and sums of requests.

    `virtual`: the mean TTFT of the same configuration in virtual time, divided by the oracle's; 0: it has none.
    """

    mean: float
    p95: float
    ttft_s: float
    errors: int
    requests: int
    virtual: float = 0.0


def text_of(prompt: bytes) -> str:
    """Returns a text of one word of three letters per token, so that prompts share the same prefixes as before."""
    words = bytearray(prompt.translate(LETTERS))
    words[3::4] = b" " * len(words[3::4])
    return words.decode()


async def play(port: int, sessions: Sequence[Session], answer_s: float) -> list[Result]:
    """Plays all sessions through the gateway. A turn starts after the pause that follows the end of the last answer.

    `answer_s`: after so many seconds without the end of an answer, the request has failed.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    results: list[Result] = []
    timeout = aiohttp.ClientTimeout(total=answer_s)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as client:

        async def one(session: Session) -> None:
            await asyncio.sleep(max(0.0, started + session.at - loop.time()))
            for turn in session.turns:
                await asyncio.sleep(turn.think_s)
                body = {"model": MODEL, "prompt": text_of(turn.prompt), "max_tokens": turn.output, "stream": True}
                at = loop.time()
                first_s = await _first_token(client, port, json.dumps(body).encode())
                results.append(Result(at - started, first_s))

        await asyncio.gather(*map(one, sessions))
    return results


async def _first_token(client: aiohttp.ClientSession, port: int, body: bytes) -> float | None:
    """Sends one request and reads its answer to the end. Returns the seconds to the first piece; None if there is no answer."""
    loop = asyncio.get_running_loop()
    at, first_s = loop.time(), None
    headers = {"content-type": "application/json"}
    try:
        async with client.post(f"http://{LOOPBACK}:{port}{COMPLETIONS}", data=body, headers=headers) as response:
            async for _ in response.content.iter_any():
                if first_s is None:
                    first_s = loop.time() - at
            return first_s if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None


@contextmanager
def servers(cluster: Cluster, simulator: str, kind: Kind, kv_blocks: int) -> Iterator[Path]:
    """Starts the servers. Yields the file with their addresses. `simulator`: the path of a binary; "": `epp sim`.

    `kv_blocks`: of each server.
    """
    if not simulator:
        yield cluster.fleet(SERVERS, *engine_flags(kind, kv_blocks)).file
        return
    ports = free_ports(SERVERS)
    for port in ports:
        child = cluster.children.start(f"server {port}", simulator_command(simulator, port, kv_blocks, kind.pace))
        cluster.wait(child, lambda port=port: get(port, "/health") is not None)  # type: ignore[misc]
    yield write_endpoints(cluster.directory / "servers.yaml", [(LOOPBACK, port) for port in ports])


def engine_flags(kind: Kind, kv_blocks: int) -> list[str]:
    """Returns the flags with which `epp sim` has servers of this kind."""
    us, ms = 1e6 * kind.pace, 1e3 * kind.pace
    flags: dict[str, float] = {"kv-blocks": kv_blocks, "block-size": BLOCK_TOKENS, "prefill-us-per-token": us * PREFILL_S}
    if kind.slots:
        settings = slot_settings(kv_blocks)
        flags |= {"slots": kind.slots, "overhead-ms": ms * settings.overhead_s, "decode-ms": ms * settings.decode_s}
    else:
        flags["decode-ms"] = ms * SHARED_DECODE_S
    return [f"--{name}={value:g}" for name, value in flags.items()]


def simulator_command(binary: str, port: int, kv_blocks: int, pace: float) -> list[str]:
    """Returns the command line of one server with slots, with the flags of llm-d-inference-sim. `pace`: as in `Kind`."""
    settings = slot_settings(kv_blocks)
    flags: Mapping[str, Any] = {
        "port": port,
        "model": MODEL,
        "max-num-seqs": settings.max_running,
        "max-model-len": 65_536,
        "latency-calculator": "per-token",
        "prefill-overhead": f"{1e3 * pace * settings.overhead_s:g}ms",
        "prefill-time-per-token": f"{1e6 * pace * settings.prefill_s_per_token:g}us",
        "inter-token-latency": f"{1e3 * pace * settings.decode_s:g}ms",
        "enable-kvcache": "true",
        "kv-cache-size": settings.kv_blocks,
        "block-size": settings.block_size,
    }
    return [binary, *(f"--{name}={value}" for name, value in flags.items())]


def live(
    kind: Kind,
    workloads: Sequence[Workload],
    configs: Mapping[str, str],
    *,
    seconds: float,
    seeds: Sequence[int],
    simulator: str = "",
    reference: str = "",
    told: Callable[[str], object] = print,
) -> dict[str, dict[str, Figures]]:
    """Runs each traffic under each picker on servers of this kind. Returns traffic -> picker -> figures over all seeds.

    `configs`: name -> text. `seconds`: at a pace of 1.
    """
    tables: dict[str, dict[str, Figures]] = {}
    for workload in workloads:
        runs: dict[str, list[Figures]] = {}
        for seed in seeds:
            for name, row in _rows(kind, workload, configs, seed, seconds, simulator, reference, told):
                runs.setdefault(name, []).append(row)
        table = tables[workload.name] = {name: over(rows) for name, rows in runs.items()}
        if len(seeds) > 1:
            told(f"{kind.name}, {workload.name}, {len(seeds)} seeds, geometric mean (lowest to highest):")
            for name, rows in runs.items():
                real, virtual = ranged(row.mean for row in rows), ranged(row.virtual for row in rows)
                told(f"  {name:24} {real}, {table[name].errors} of {table[name].requests} failed, {virtual} in virtual time")
        told(f"  rank correlation with virtual time: {agreement(table.values()):.2f}")
    return tables


def _rows(
    kind: Kind,
    workload: Workload,
    configs: Mapping[str, str],
    seed: int,
    seconds: float,
    simulator: str,
    reference: str,
    told: Callable[[str], object],
) -> Iterator[tuple[str, Figures]]:
    """Yields the figures of each picker in one run."""
    virtual = virtually(kind, workload, configs, seed, seconds)
    oracle = virtual[ORACLE]
    told(f"{kind.name}, {workload.name}, oracle in virtual time: {1e3 * oracle.ttft_mean:.0f} ms, p95 {1e3 * oracle.ttft_p95:.0f}")
    rate = kind.rate.get(workload.name, kind.usual_rate)
    sessions = paced(workload.make(random.Random(f"{seed}/{workload.name}"), seconds, rate), kind.pace)
    for name in (*configs, *([REFERENCE] if reference else [])):
        with Cluster() as cluster, servers(cluster, simulator, kind, workload.kv_blocks) as file:
            picker = _picker(cluster, file, configs.get(name, ""), reference)
            results = asyncio.run(play(cluster.envoy(picker), sessions, ANSWER_S * kind.pace))
        twin = virtual[name].ttft_mean / oracle.ttft_mean if name in configs else 0.0
        row = figures(results, WARM_UP * seconds * kind.pace, oracle.ttft_mean, oracle.ttft_p95)._replace(virtual=twin)
        told(
            f"  {name:24} {row.mean:7.2f} {row.p95:7.2f} {1e3 * row.ttft_s:8.0f} ms {row.errors} of {row.requests} failed, "
            f"{row.virtual:.2f} in virtual time"
        )
        yield name, row


def virtually(kind: Kind, workload: Workload, configs: Mapping[str, str], seed: int, seconds: float) -> dict[str, Outcome]:
    """Runs the oracle and the configurations in virtual time, each with as many workers as in real time."""
    policies = {name: configured(text, workers=WORKERS) for name, text in configs.items()}
    return measure(kind, workload, {ORACLE: LINE[ORACLE], **policies}, seed, seconds)


def over(runs: Sequence[Figures]) -> Figures:
    """Sums up the figures of one picker over several runs."""
    mean, p95, virtual = (_geometric(values) for values in zip(*((row.mean, row.p95, row.virtual) for row in runs), strict=True))
    errors, requests = sum(row.errors for row in runs), sum(row.requests for row in runs)
    return Figures(mean, p95, sum(row.ttft_s for row in runs) / len(runs), errors, requests, virtual)


def ranged(values: Iterable[float]) -> str:
    """Renders the geometric mean and the range of values."""
    found = sorted(values)
    return f"{_geometric(found):7.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def _geometric(values: Sequence[float]) -> float:
    """Returns the geometric mean; 0 if a value is missing."""
    return geometric_mean(values) if all(values) else 0.0


def agreement(rows: Iterable[Figures]) -> float:
    """Returns the rank correlation (Spearman's) of the real and the virtual means of the rows that have both; 1 for fewer than two."""
    both = [(row.mean, row.virtual) for row in rows if row.virtual]
    if len(both) < 2:
        return 1.0
    ranks = np.array(both).argsort(axis=0).argsort(axis=0)
    return float(np.corrcoef(ranks, rowvar=False)[0, 1])


def _picker(cluster: Cluster, file: Path, text: str, reference: str) -> Picker:
    """Starts our picker with a configuration, or the reference with the field's weights if there is no text."""
    if text:
        return cluster.picker(file, workers=WORKERS, config_text=picker_config(file, yaml.safe_load(text)), run_dir=cluster.directory)
    return cluster.reference(reference, file, reference_config(file), "--secure-serving=false")


def reference_config(file: Path) -> str:
    """Returns the field's weights as the reference reads them: it names the discovery plugin without a kind."""
    config = yaml.safe_load(picker_config(file, yaml.safe_load(FIELD_TEXT)))
    config["dataLayer"] = {"discovery": config["dataLayer"]["discovery"]["endpoints"]}
    return str(yaml.safe_dump(config, sort_keys=False))


def figures(results: Sequence[Result], warm_up_s: float, mean_s: float, p95_s: float) -> Figures:
    """Computes the figures of the requests after the warm-up. `mean_s`, `p95_s`: of the oracle."""
    counted = [result for result in results if result.at >= warm_up_s]
    times = sorted(result.first_s for result in counted if result.first_s is not None)
    if not times:
        return Figures(float("inf"), float("inf"), float("inf"), len(counted), len(counted))
    ttft_s = sum(times) / len(times)
    return Figures(ttft_s / mean_s, times[int(0.95 * len(times))] / p95_s, ttft_s, len(counted) - len(times), len(counted))
