"""The routing benchmark in real time: simulated servers, a real picker and a real Envoy, on loopback.

The traffic is that of the virtual runs. The servers are those of `epp sim`, as the model `shared` or `slots`, or of a simulator with the
flags of llm-d-inference-sim, as the model `slots`. Times to the first token are divided by those of the oracle on that model in
virtual time, so they include what picker, gateway, simulator and load generator take on this machine. Each configuration runs in virtual
time, too, on the same model and traffic: the rank correlation of both orders says whether the virtual figures can be believed.
"""

import asyncio
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import yaml

from epp.config.load import DEFAULT_TEXT
from loadtest.demo.ports import free_ports
from loadtest.demo.stack import LOOPBACK, get, picker_config
from tests.bench.routing_run import WARM_UP, measure
from tests.bench.routing_servers import KINDS, PREFILL_S, SERVERS, SHARED_DECODE_S, Kind, slot_settings
from tests.bench.routing_traffic import BLOCK_TOKENS, Session, Workload
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


async def play(port: int, sessions: Sequence[Session]) -> list[Result]:
    """Plays all sessions through the gateway. A turn starts after the pause that follows the end of the last answer."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    results: list[Result] = []
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
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
        child = cluster.children.start(f"server {port}", simulator_command(simulator, port, kv_blocks))
        cluster.wait(child, lambda port=port: get(port, "/health") is not None)  # type: ignore[misc]
    yield write_endpoints(cluster.directory / "servers.yaml", [(LOOPBACK, port) for port in ports])


def engine_flags(kind: Kind, kv_blocks: int) -> list[str]:
    """Returns the flags with which `epp sim` has servers of this kind."""
    flags: dict[str, float] = {"kv-blocks": kv_blocks, "block-size": BLOCK_TOKENS, "prefill-us-per-token": 1e6 * PREFILL_S}
    if kind.slots:
        settings = slot_settings(kv_blocks)
        flags |= {"slots": kind.slots, "overhead-ms": 1e3 * settings.overhead_s, "decode-ms": 1e3 * settings.decode_s}
    else:
        flags["decode-ms"] = 1e3 * SHARED_DECODE_S
    return [f"--{name}={value:g}" for name, value in flags.items()]


def simulator_command(binary: str, port: int, kv_blocks: int) -> list[str]:
    """Returns the command line of one server with slots, with the flags of llm-d-inference-sim."""
    settings = slot_settings(kv_blocks)
    flags: Mapping[str, Any] = {
        "port": port,
        "model": MODEL,
        "max-num-seqs": settings.max_running,
        "max-model-len": 65_536,
        "latency-calculator": "per-token",
        "prefill-overhead": f"{1e3 * settings.overhead_s:g}ms",
        "prefill-time-per-token": f"{1e6 * settings.prefill_s_per_token:g}us",
        "inter-token-latency": f"{1e3 * settings.decode_s:g}ms",
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
    seed: int,
    simulator: str = "",
    reference: str = "",
    told: Callable[[str], object] = print,
) -> dict[str, dict[str, Figures]]:
    """Runs each traffic under each picker on servers of this kind. `configs`: name -> text. Returns traffic -> picker -> figures."""
    tables: dict[str, dict[str, Figures]] = {}
    for workload in workloads:
        sessions = workload.make(random.Random(f"{seed}/{workload.name}"), seconds, kind.rate.get(workload.name, kind.usual_rate))
        policies = {ORACLE: LINE[ORACLE], **{name: configured(text) for name, text in configs.items()}}
        virtual = measure(kind, workload, policies, seed, seconds)
        oracle = virtual[ORACLE]
        told(f"{kind.name}, {workload.name}, oracle in virtual time: {1e3 * oracle.ttft_mean:.0f} ms, p95 {1e3 * oracle.ttft_p95:.0f}")
        table = tables[workload.name] = {}
        for name in (*configs, *([REFERENCE] if reference else [])):
            with Cluster() as cluster, servers(cluster, simulator, kind, workload.kv_blocks) as file:
                picker = _picker(cluster, file, configs.get(name, ""), reference)
                results = asyncio.run(play(cluster.envoy(picker), sessions))
            twin = virtual[name].ttft_mean / oracle.ttft_mean if name in configs else 0.0
            row = table[name] = figures(results, WARM_UP * seconds, oracle.ttft_mean, oracle.ttft_p95)._replace(virtual=twin)
            told(
                f"  {name:24} {row.mean:7.2f} {row.p95:7.2f} {1e3 * row.ttft_s:8.0f} ms {row.errors} of {row.requests} failed, "
                f"{row.virtual:.2f} in virtual time"
            )
        told(f"  rank correlation with virtual time: {agreement(table.values()):.2f}")
    return tables


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
