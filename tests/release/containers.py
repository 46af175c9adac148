"""Runs the image as Kubernetes would: with the security settings, the memory limit and the size of /dev/shm that the chart gives.

    python -m tests.release.containers dist/endpoint-picker-0.3.0-image.tar
    python -m tests.release.containers --pure    makes an image of the pure wheel first, for a machine where nothing is compiled

Needs podman and runc (on Debian: apt install podman runc), and root or user namespaces; without them it says so, with exit code 3. The
containers use this machine's network, so that they are reached at loopback addresses.
"""

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import grpc.aio

from loadtest.demo.ports import free_ports
from release.errors import Missing
from release.image import oci, root
from release.source import ROOT, checked_out
from release.wheels import distributions
from tests import field
from tests.deploy.renderers import ours

READY_S: Final = 60.0
COMMAND_S: Final = 300.0
ENGINE_FAILED: Final = range(125, 127)  # exit codes of `podman run` if podman or runc fails, not the command
SKIPPED: Final = 3
BYTES_MAX: Final = 150_000_000
MACHINE: Final = "x86_64"
UNITS: Final = {"Mi": 1 << 20, "Gi": 1 << 30}
WRITE: Final = """
import pathlib, sys
for name in ("/here", "/tmp/here", "/etc/epp/here", "/dev/shm/here"):
    try:
        pathlib.Path(name).write_text("x")
        print(name)
    except OSError:
        pass
"""
IMPORT = """
import importlib, pkgutil
for top in ("epp", "shm", "workers"):
    for module in pkgutil.walk_packages(importlib.import_module(top).__path__, f"{top}."):
        if not module.name.startswith(("workers.__main__", "loadtest.demo", "workers.cli.top")):  # need extras that the image has not
            importlib.import_module(module.name)
from workers.worker.telemetry import tracing_export
import hiredis, numpy.linalg, numpy.random, opentelemetry.exporter.otlp.proto.grpc.trace_exporter, redis.asyncio, uvloop, zstandard
import cel
assert cel.evaluate("1 + 1") == 2
"""
Json = dict[str, Any]


class Podman:
    """podman with a store of its own, so that nothing of this machine's containers is touched."""

    def __init__(self, folder: Path) -> None:
        stores = [f"--root={folder / 'store'}", f"--runroot={folder / 'run'}", "--storage-driver=vfs"]
        self._command = ["podman", *stores, "--cgroup-manager=cgroupfs", "--events-backend=file", "--runtime=runc"]

    def __call__(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs a command. Raises Missing if there is no podman, and CalledProcessError; standard error is shown."""
        for program in ("podman", "runc"):
            if shutil.which(program) is None:
                raise Missing(f"there is no {program} (on Debian: apt install {program})")
        done = subprocess.run([*self._command, *arguments], capture_output=True, text=True, timeout=COMMAND_S)
        if check and done.returncode:
            sys.stderr.write(done.stderr)
            done.check_returncode()
        return done

    def load(self, archive: Path) -> str:
        """Loads an OCI archive. Returns the name of the image. Raises Missing if podman cannot work here."""
        if (cannot := self("info", check=False)).returncode:
            raise Missing(f"podman cannot work here: {cannot.stderr.strip()[-600:]}")
        return re.findall(r"Loaded image: (\S+)", self("load", "--input", str(archive)).stdout)[0]


def confined() -> list[str]:
    """Returns the options of `podman run` that do what the chart's Deployment asks for."""
    objects = ours({"router": {"modelServers": {"matchLabels": {"app": "vllm"}}}})
    (pod,) = [each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Deployment"]
    (container,) = [each for each in pod["containers"] if each["name"] == "epp"]
    (memory,) = [each["emptyDir"]["sizeLimit"] for each in pod["volumes"] if each["name"] == "shm"]
    allowed = pod["securityContext"] | container["securityContext"]
    assert allowed["readOnlyRootFilesystem"] and allowed["runAsNonRoot"] and not allowed["allowPrivilegeEscalation"]
    assert allowed["seccompProfile"] == {"type": "RuntimeDefault"}
    return [
        *("--read-only", "--read-only-tmpfs=false", "--security-opt=no-new-privileges", "--network=host"),
        *(f"--tmpfs={each['mountPath']}" for each in container["volumeMounts"] if each["name"] == "recent"),
        *(f"--cap-drop={name}" for name in allowed["capabilities"]["drop"]),
        *(f"--memory={amount(container['resources']['limits']['memory'])}", f"--shm-size={amount(memory)}"),
        *("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096"),  # podman's own are above what some machines allow
    ]


def amount(text: str) -> int:
    """Returns the bytes of a quantity of Kubernetes."""
    return int(text[:-2]) * UNITS[text[-2:]]


@contextmanager
def picker(podman: Podman, image: str, addresses: Sequence[str]) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Runs the picker. Yields the container's id and its ports: ext_proc, health, metrics."""
    ports = free_ports(3)
    names = ("grpc-port", "grpc-health-port", "metrics-port")
    flags = [f"--{name}={port}" for name, port in zip(names, ports, strict=True)]
    flags += [f"--endpoints={','.join(addresses)}", "--secure-serving=false", "--workers=2"]
    started = podman("run", "--detach", *confined(), image, *flags, check=False)
    if started.returncode in ENGINE_FAILED:
        raise Missing(f"no container can run here: {started.stderr.strip()[-600:]}")
    started.check_returncode()
    name = started.stdout.strip()
    try:
        yield name, (ports[0], ports[1], ports[2])
    finally:
        podman("rm", "--force", "--ignore", name)


def started(podman: Podman, name: str, metrics: int) -> float:
    """Waits until the picker is ready. Returns the seconds since its container started. Raises AssertionError."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            page(metrics, "/readyz")
            now = time.time()
            began = podman("inspect", "--format", "{{json .State.StartedAt}}", name).stdout
            return now - datetime.fromisoformat(re.sub(r"\.(\d{6})\d*", r".\1", json.loads(began))).timestamp()
        except OSError:
            time.sleep(0.02)
    raise AssertionError(f"the picker is not ready; its log:\n{podman('logs', name, check=False).stderr[-4000:]}")


def page(port: int, path: str) -> str:
    """Returns a page of the metrics port. Raises OSError."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return str(answer.read().decode())


async def health(port: int) -> str:
    """Returns the answer of the health port, as grpc.health.v1 has it."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        return {b"\x08\x01": "SERVING", b"\x08\x02": "NOT_SERVING"}[await check(b"", timeout=10)]


def tried(podman: Podman, image: str) -> Json:
    """Runs the image, uses everything that Kubernetes and a gateway use, and ends it. Returns the figures. Raises AssertionError."""
    with (
        tempfile.TemporaryDirectory() as folder,
        field.simulated(Path(folder)) as addresses,
        picker(podman, image, addresses) as (name, (ext_proc, health_port, metrics)),
    ):
        seconds = started(podman, name, metrics)
        call = field.Call("/v1/completions", "application/json", field.COMPLETION)
        assert (why := field.chosen(ext_proc, call, addresses)) == "", why
        assert asyncio.run(health(health_port)) == "SERVING"
        assert "llm_d_epp_info{" in page(metrics, "/metrics")
        written = podman("exec", name, "python3", "-c", WRITE).stdout.split()
        assert written == ["/tmp/here", "/dev/shm/here"], f"the picker can write {written}"
        podman("exec", name, "python3", "-c", IMPORT)
        version = podman("exec", name, "epp", "--version").stdout.strip()
        limits = json.loads(podman("inspect", "--format", "{{json .HostConfig}}", name).stdout)
        began = time.monotonic()
        podman("stop", "--time", "60", name)
        drained = time.monotonic() - began
        code = podman("inspect", "--format", "{{.State.ExitCode}}", name).stdout.strip()
        assert code == "0", podman("logs", name, check=False).stderr[-4000:]
    return {
        "version": version,
        "ready_s": round(seconds, 2),
        "drain_s": round(drained, 2),
        "memory_limit": limits["Memory"],
        "shm_bytes": limits["ShmSize"],
    }


def pure_image(folder: Path) -> Path:
    """Makes an image of the pure wheel of the current commit. Returns the archive."""
    tree, into = folder / "tree", folder / "dist"
    tree.mkdir()
    into.mkdir()
    source = checked_out(tree)
    _, wheel = distributions(source, into)
    place = folder / f"root-{MACHINE}"
    root.assemble(place, wheel, MACHINE)
    size = root.size(place)
    assert size <= BYTES_MAX, f"the image has {size / 1e6:.1f} MB"
    return oci.archive(source, {MACHINE: place}, into)


def main() -> int:
    line = argparse.ArgumentParser(prog="python -m tests.release.containers", description=(__doc__ or "").split("\n")[0])
    line.add_argument("archive", type=Path, nargs="?")
    line.add_argument("--pure", action="store_true", help="make an image of the pure wheel")
    given = line.parse_args()
    (ROOT / ".cache").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="containers-", dir=ROOT / ".cache") as folder:
        try:
            podman = Podman(Path(folder))
            image = podman.load(pure_image(Path(folder)) if given.pure else given.archive)
            print(json.dumps(tried(podman, image)))
        except Missing as missing:
            print(f"skipped: {missing}")
            return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
