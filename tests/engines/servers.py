"""Starts real engines with tiny models, and asks them for their pages."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from loadtest.demo.children import Child
from loadtest.demo.ports import free_ports
from loadtest.demo.stack import LOOPBACK, get
from tests.e2e.cluster import Cluster, ask
from tests.engines.setup import FOLDER, HERE, MODELS, PYTHON

MODEL: Final = "tiny"
START_S: Final = 420.0  # a server starts in one to four minutes on two cores
THREADS: Final = "1"
NICE: Final = "5"
ENVIRONMENT: Final = {
    "HOME": str(FOLDER / "home"),
    "OMP_NUM_THREADS": THREADS,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONHASHSEED": "0",
}
FLAGS: Final = {"served-model-name": MODEL, "host": LOOPBACK, "max-model-len": "4096", "max-num-seqs": "16", "dtype": "float32"}
SWITCHES: Final = ("enforce-eager", "enable-prefix-caching", "enable-prompt-tokens-details", "enable-scale-out")

_numbers = itertools.count()


class Engine:
    """A running engine. `RUNNING`: its metric of running requests."""

    RUNNING = "vllm:num_requests_running"

    def __init__(self, port: int, child: Child) -> None:
        self.port = port
        self.child = child

    def kill(self, cluster: Cluster) -> None:
        """Kills the engine with its processes."""
        self.child.kill_group()
        self.child.process.wait()
        cluster.children.all.remove(self.child)

    def kill_rank(self, rank: int) -> None:
        """Kills the process of one data-parallel rank of a vLLM server."""
        title = f"VLLM::EngineCore_DP{rank}".encode()
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                pid = int(entry.parent.name)
                if entry.read_bytes().startswith(title) and os.getpgid(pid) == self.child.process.pid:
                    os.kill(pid, signal.SIGKILL)
                    return
        raise AssertionError(f"no process is named {title!r}")

    def samples(self, name: str) -> list[Sample]:
        """Returns the series of a metric on the engine's page."""
        page = self._ask("/metrics", None, "GET").decode()
        series = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
        return [sample for sample in series if sample.name == name]

    def total(self, name: str) -> float:
        """Returns the sum of a metric's series."""
        return sum(sample.value for sample in self.samples(name))

    def forget(self) -> None:
        """Empties the prefix cache. vLLM's KV events tell it with the next step, so this sends a prompt of a few blocks, too."""
        self._ask("/reset_prefix_cache", b"")
        self._ask("/v1/completions", json.dumps({"model": MODEL, "prompt": list(range(5, 305)), "max_tokens": 1}).encode())

    def _ask(self, path: str, body: bytes | None, method: str = "POST") -> bytes:
        answer = ask(self.port, path, body, method=method)
        assert answer.status == 200, (path, answer)
        return answer.body


class LlamaCpp(Engine):
    """A running server of llama.cpp."""

    RUNNING = "llamacpp:requests_processing"

    def forget(self) -> None:
        """Does nothing: llama.cpp cannot be told to forget, and each test starts a server of its own."""


def llama_cpp(cluster: Cluster) -> LlamaCpp:
    """Starts a llama.cpp server and waits until it serves."""
    (port,) = free_ports(1)
    argv = [str(PYTHON), str(HERE / "llama_server.py"), str(MODELS / "tiny.gguf"), str(port)]
    return LlamaCpp(port, _started(cluster, "llama.cpp", argv, port))


def vllm(
    cluster: Cluster, *flags: str, model: str = MODEL, port: int = 0, events: Sequence[int] = (), topic: str = "kv@engine@tiny"
) -> Engine:
    """Starts a vLLM server and waits until it serves. `port`: 0: a free one. `events`: the ports of its KV events and of their replay."""
    port = port or free_ports(1)[0]
    argv = [str(PYTHON.with_name("vllm")), "serve", str(MODELS / model), f"--port={port}"]
    argv += [f"--{name}={value}" for name, value in FLAGS.items()]
    argv += [f"--{name}" for name in SWITCHES]
    if events:
        argv.append("--kv-events-config=" + kv_events(*events, topic=topic))
    return Engine(port, _started(cluster, "vllm", [*argv, *flags], port))


def kv_events(port: int, replay: int = 0, *, topic: str) -> str:
    """Returns vLLM's configuration of KV events, as JSON. `replay`: 0: there is no replay socket. `topic`: "": the default one.

    vLLM listens only at an address with a star, and connects to any other.
    """
    endpoints = {"endpoint": port} | ({"replay_endpoint": replay} if replay else {})
    settings = {name: f"tcp://*:{number}" for name, number in endpoints.items()} | ({"topic": topic} if topic else {})
    return json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", **settings})


def _started(cluster: Cluster, kind: str, argv: Sequence[str], port: int) -> Child:
    """Starts an engine at low priority, without this project in its path. Returns it when it serves."""
    variables = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    name = f"{kind} {next(_numbers)}"
    child = cluster.children.start(name, ["env", "-u", "PYTHONPATH", *variables, "nice", "-n", NICE, *argv])
    asyncio.run(cluster.children.ready(child, lambda: get(port, "/health") is not None, START_S))
    return child
