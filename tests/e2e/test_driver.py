"""The driver against a real picker: it gets every answer whole, and counts errors by name."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Picker
from tests.e2e.conftest import Gateway


def drive(picker: Picker, *flags: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "loadtest.load.driver", "--target", f"127.0.0.1:{picker.grpc}", "--json"]
    done = subprocess.run(
        [*command, "--seconds", "0.5", "--warm-up", "0.1", *flags], capture_output=True, text=True, timeout=60, check=False
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
def test_every_request_of_a_case_gets_its_whole_answer(gateway: Gateway, flags: list[str]) -> None:
    code, result = drive(gateway.picker, *flags)
    assert (code, set(result["endings"])) == (0, {"ok"}), result
    assert result["pick_ms"]["p50"] <= result["full_ms"]["p50"]


def test_the_report_has_the_pickers_memory_and_cores(gateway: Gateway) -> None:
    group = os.getpgid(gateway.picker.child.pid)
    _, result = drive(gateway.picker, "--group", str(group))
    assert result["memory_mib"] > 0
    assert result["cores"] >= 0


def test_refusals_are_counted_and_shown(cluster: Cluster) -> None:
    """A body above the picker's limit is refused."""
    small = cluster.picker(cluster.fleet(1).file, "--body-limit=500", workers=1)
    code, result = drive(small)
    assert code == 1
    assert set(result["endings"]) == {"refused"}
    assert "request body exceeds 500 bytes" in result["errors"][0]
