"""A real instance for one test: its segments, sockets and pipes, all gone afterwards."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epp.config import load
from workers.cli.options import Options
from workers.instance import Instance


def options(run_dir: Path, **changes: Any) -> Options:
    """Small, on free ports, without TLS."""
    given: dict[str, Any] = {
        "run_dir": str(run_dir),
        "instance": f"test-{uuid.uuid4().hex[:8]}",
        "workers": 2,
        "grpc_port": 0,
        "grpc_health_port": 0,
        "metrics_port": 0,
        "secure_serving": False,
        "max_endpoints": 8,
        "index_entries": 4096,
        "drain_timeout_s": 1.0,
        "endpoints": "127.0.0.1:1",
    }
    return Options(**(given | changes))


@contextlib.contextmanager
def made(run_dir: Path, config_text: str = "", **changes: Any) -> Iterator[Instance]:
    """An instance, and the end of it."""
    instance = Instance.create(options(run_dir, **changes), load(config_text, "test"))
    try:
        yield instance
    finally:
        instance.unlink()
        for listener in (instance.listener, instance.health_listener, instance.metrics_listener):
            listener.close()
        pipes = (instance.life, instance.family, instance.reports, *instance.bus)
        for descriptor in (*(end for pipe in pipes for end in pipe), *instance.wakeups):
            with contextlib.suppress(OSError):
                os.close(descriptor)
