"""What `epp serve` loads before it forks: every process of the picker has it in memory."""

import subprocess
import sys
from pathlib import Path

LOAD = """
import sys
from workers.cli import main
main.get_command(None, "serve")
from epp.config.registry import names
names()
import workers.supervisor.main, workers.worker.main, workers.cli.trial
print(*sys.modules)
"""
UNUSED = (
    "rich",  # of structlog, for tracebacks in colour
    "pygments",
    "greenlet",
    "aiohttp",
    "kubernetes_asyncio",
    "opentelemetry",
    "grpc",
    "redis",
    "zmq",
    "numpy.random",
    "google.protobuf",
    "importlib.metadata",
    "email",
    "zipfile",
    "workers.supervisor.kube.discovery",
    "workers.supervisor.kube.review",
    "workers.replicas.exchange",
    "workers.supervisor.kv_events.main",
    "workers.supervisor.pages.metrics",
)


def test_a_picker_loads_nothing_that_only_few_pickers_need() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", LOAD], cwd=root, capture_output=True, text=True, timeout=120, check=True)
    loaded = set(done.stdout.split())
    assert "workers.supervisor.main" in loaded
    assert loaded.isdisjoint(UNUSED), loaded.intersection(UNUSED)
