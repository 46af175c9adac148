"""A real instance for one test. Its segments, sockets and pipes are removed afterwards."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epp.config.load import load
from workers.host.options import Options
from workers.process.instance import Instance


def options(run_dir: Path, **changes: Any) -> Options:
    """Options for a small instance on free ports, without TLS."""
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
def made(run_dir: Path, config_text: str | None = None, *, allow_experimental: bool = False, **changes: Any) -> Iterator[Instance]:
    """Create an instance, and remove it afterwards."""
    with removed(
        Instance.create(options(run_dir, **changes), load(config_text, "test", allow_experimental=allow_experimental))
    ) as instance:
        yield instance


@contextlib.contextmanager
def removed(instance: Instance) -> Iterator[Instance]:
    """Removes an instance afterwards."""
    try:
        yield instance
    finally:
        instance.unlink()
        instance.generations.close()
        sockets = instance.sockets
        for listener in (sockets.ext_proc, sockets.health, sockets.metrics, *sockets.pools):
            listener.close()
        pipes = (instance.pipes.parent_pipe, instance.pipes.workers_pipe, instance.pipes.reports, *instance.pipes.bus)
        for descriptor in (*(end for pipe in pipes for end in pipe), *instance.pipes.wakeups):
            with contextlib.suppress(OSError):
                os.close(descriptor)
