"""The raw driver against a real picker: every case comes back whole, and what goes wrong is counted by its name."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Picker
from tests.e2e.conftest import Gateway


def drive(picker: Picker, *flags: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "loadtest.driver", "--target", f"127.0.0.1:{picker.grpc}", "--json"]
    done = subprocess.run(
        [*command, "--seconds", "0.5", "--warm-up", "0.1", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize(
    "flags",
    [
        ["--case", "short"],
        ["--case", "short-c64", "--connections", "1"],
        ["--case", "chat-8k", "--rate", "100"],
        ["--case", "long-shared"],
        ["--case", "sse", "--processes", "2"],
    ],
    ids=lambda flags: " ".join(flags[1:]),
)
def test_every_request_of_a_case_is_answered_whole(gateway: Gateway, flags: list[str]) -> None:
    code, found = drive(gateway.picker, *flags)
    assert (code, set(found["endings"])) == (0, {"ok"}), found
    assert found["pick_ms"]["p50"] <= found["full_ms"]["p50"]


def test_the_pickers_cost_is_charged_to_the_requests(gateway: Gateway) -> None:
    group = os.getpgid(gateway.picker.child.pid)
    _, found = drive(gateway.picker, "--group", str(group))
    assert found["memory_mib"] > 0
    assert found["cores"] >= 0


def test_refusals_are_counted_and_shown(cluster: Cluster) -> None:
    """A body above the picker's limit is one."""
    small = cluster.picker(cluster.fleet(1).file, "--body-limit=500", workers=1)
    code, found = drive(small)
    assert code == 1
    assert set(found["endings"]) == {"refused"}
    assert "request body exceeds 500 bytes" in found["errors"][0]
