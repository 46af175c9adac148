"""Reloads of a picker in the cluster, and the events on its pool that report them."""

import os
import signal
from pathlib import Path
from typing import Any

from tests.e2e.cluster import Picker
from tests.kube.world import World

PLUGINS = "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: [{{type: queue-scorer, name: {name}}}]\n"
FIRST, SECOND = PLUGINS.format(name="one"), PLUGINS.format(name="two")


def events(world: World) -> list[dict[str, Any]]:
    """Returns the events of the pool, oldest first."""
    path = f"/api/v1/namespaces/{world.space}/events?fieldSelector=involvedObject.name=pool"
    found: list[dict[str, Any]] = world.kube.request("GET", path)["items"]
    return sorted(found, key=lambda event: event["metadata"]["name"])


def started(world: World, *flags: str, **options: Any) -> tuple[Picker, Path]:
    """Starts a picker with a configuration file. Returns both."""
    config = world.cluster.directory / "config.yaml"
    config.write_text(FIRST)
    return world.picker(f"--config-file={config}", *flags, **options), config


def reload(picker: Picker, config: Path, text: str = SECOND) -> None:
    """Changes the configuration and asks the picker to reload it."""
    config.write_text(text)
    os.kill(picker.child.process.pid, signal.SIGHUP)
