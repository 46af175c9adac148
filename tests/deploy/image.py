"""Runs the steps of deploy/Dockerfile in a fresh directory, for machines that cannot build an image.

    python -m tests.deploy.image

The root `/` of the image is a directory, and paths in the steps point into it. A stage after FROM starts only with the files that it copies
from the stage before. `useradd` is skipped: users belong to the machine. Then the test runs the image's programs as the image's user, and
with a read-only root file system if the test runs as root and may mount.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from workers.cli.demo.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
STEP_S = 300.0
READY_S = 30.0
LEFT_OUT = ("useradd", "apt-get update")  # skipped steps: the machine has its users and its compiler
PLACES = ("/opt/epp", "/source", "/etc/epp")  # paths inside the image; all other paths in steps are the machine's
KNOWN = frozenset(("ARG", "FROM", "WORKDIR", "RUN", "COPY", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD"))
COMPILERS = ("gcc", "cc", "g++", "clang", "make", "pip", "pip3")


class Step(NamedTuple):
    """One instruction of the Dockerfile."""

    word: str
    rest: str


class Image(NamedTuple):
    """The result of all steps."""

    root: Path
    user: str
    command: tuple[str, ...]
    environment: dict[str, str]


def steps(text: str) -> Iterator[Step]:
    """The instructions of a Dockerfile. Raises ValueError for an unknown instruction."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in filter(None, (line.strip() for line in lines.replace("\\\n", " ").splitlines())):
        word, _, rest = line.partition(" ")
        if word not in KNOWN:
            raise ValueError(f"{word}: unknown instruction")
        yield Step(word, rest.strip())


def build(root: Path) -> Image:
    """Runs the steps. Raises CalledProcessError, ValueError."""
    tools = root / "tools"  # in place of the base image's python
    tools.mkdir(parents=True)
    (tools / "python").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(root / "home"), "LANG": "C.UTF-8"}
    environment |= {
        name: value for name, value in os.environ.items() if name.startswith("PIP_") or "proxy" in name.lower()
    }
    folder, user, command, copied = root, "", list[str](), set[str]()
    for word, rest in steps(DOCKERFILE.read_text()):
        if word == "FROM":
            folder = root
        elif word == "WORKDIR":
            folder = root / rest.lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
        elif word == "RUN" and not rest.startswith(LEFT_OUT):
            subprocess.run(["sh", "-ec", inside(rest, root)], cwd=folder, env=environment, check=True, timeout=STEP_S)
        elif word == "COPY":
            copied |= copy(rest.split(), root, folder)
        elif word == "ENV":
            environment |= dict(variables(inside(rest, root), environment))
        elif word == "USER":
            user = rest
        elif word in ("ENTRYPOINT", "CMD"):
            command += json.loads(rest)
    shutil.rmtree(root / "source")
    assert copied == {"/opt/epp"}, f"the last stage copies {copied} from the first"
    return Image(root, user, tuple(inside(part, root) for part in command), environment)


def inside(text: str, root: Path) -> str:
    """Replaces paths of the image by paths in this directory."""
    return re.sub(rf"(?<![\w./-])({'|'.join(PLACES)})\b", lambda match: f"{root}{match[1]}", text)


def copy(words: Sequence[str], root: Path, folder: Path) -> set[str]:
    """Copies from the repository. Files of another stage exist already, at the same path. Returns the paths from another stage."""
    *sources, target = words
    if sources[0].startswith("--from="):
        assert sources[1] == target and (root / target.lstrip("/")).exists()
        return {target}
    to = root / target.lstrip("/") if target.startswith("/") else folder / target
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            at = to / source if target.endswith("/") else to
            at.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, at)
    return set()


def variables(text: str, known: dict[str, str]) -> Iterator[tuple[str, str]]:
    for pair in text.split():
        name, _, value = pair.partition("=")
        yield name, re.sub(r"\$(\w+)", lambda match: known[match[1]], value)


def run(image: Image, *arguments: str) -> str:
    """Runs the image's `epp` as the image's user. Returns its output. Raises CalledProcessError."""
    command = [*as_user(image), image.command[0], *(inside(argument, image.root) for argument in arguments)]
    environment = image.environment | {"HOME": "/nonexistent"}
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout


def as_user(image: Image) -> list[str]:
    """The command prefix that changes the user. Only root can do that; otherwise it is empty."""
    if os.getuid() or not shutil.which("setpriv"):
        return []
    user, _, group = image.user.partition(":")
    return ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--bounding-set=-all", "--no-new-privs"]


def read_only(image: Image) -> list[str]:
    """The command prefix for a read-only root file system and a private /dev/shm. Empty if this machine does not allow it."""
    mounts = "mount -o remount,bind,ro / && mount -t tmpfs -o size=64m,mode=1777 shm /dev/shm"
    if (
        os.getuid()
        or subprocess.run(["unshare", "--mount", "sh", "-c", mounts], capture_output=True, check=False).returncode
    ):
        return []
    hidden = f"mount --bind {image.root} {image.root} && mount -o remount,bind,ro {image.root}"
    return ["unshare", "--mount", "sh", "-c", f'{mounts} && {hidden} && exec "$@"', "sh"]


def serve(image: Image) -> str:
    """Starts the picker as its user, waits until it is ready, and ends it. Returns how it was confined. Raises AssertionError."""
    grpc, health, metrics = free_ports(3)
    flags = [f"--grpc-port={grpc}", f"--grpc-health-port={health}", f"--metrics-port={metrics}", "--workers=2"]
    confined = read_only(image)
    command = [*confined, *as_user(image), image.command[0], "serve", "--endpoints=127.0.0.1:1", *flags]
    with subprocess.Popen(command, env=image.environment, cwd="/", stderr=subprocess.PIPE, text=True) as picker:
        deadline = time.monotonic() + READY_S
        while not answers(metrics) and picker.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        ready = answers(metrics)
        picker.terminate()
        _, errors = picker.communicate(timeout=READY_S)
    assert ready and picker.returncode == 0, f"exit {picker.returncode}: {errors[-3000:]}"
    return (
        "only /dev/shm writable"
        if confined
        else "a writable file system, because this machine allows no read-only mount"
    )


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def superfluous(image: Image) -> list[str]:
    """Compilers and installers that remain in the image."""
    return sorted(str(path) for path in (image.root / "opt").rglob("*") if path.name in COMPILERS)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="epp-image-") as directory:
        os.chmod(directory, 0o755)
        begun = time.monotonic()
        image = build(Path(directory))
        size = sum(path.lstat().st_size for path in (image.root / "opt").rglob("*") if not path.is_dir())
        print(f"built in {time.monotonic() - begun:.0f} s; {size >> 20} MiB in /opt/epp; user {image.user}")
        print(run(image, "--version").strip())
        run(image, "check", "--quiet", "/etc/epp/config.yaml")
        objects = run(image, "manifests", "--selector=app=vllm").count("\nkind: ")
        print(f"epp check: ok; epp manifests: {objects} objects; epp serve: ready with {serve(image)}")
        if left := superfluous(image):
            print("\n".join(["FAILED: not necessary for serving:", *left]))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
