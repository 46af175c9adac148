"""The steps of deploy/Dockerfile in a fresh directory, for machines where no image can be built.

    python -m tests.deploy.image

`/` of the image is a directory, and paths in the steps point into it. What begins with FROM begins with nothing but what it copies from the
stage before. `useradd` is left out: users are the machine's. Then what is in the image is run as its user, and by root with a root
file system that cannot be written, where that is to be had.
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

from workers.demo.children import free_ports

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
STEP_S = 300.0
READY_S = 30.0
LEFT_OUT = ("useradd",)
PLACES = ("/opt/epp", "/source", "/etc/epp")  # of the image; everything else that steps name is the machine's
KNOWN = frozenset(("ARG", "FROM", "WORKDIR", "RUN", "COPY", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD"))
COMPILERS = ("gcc", "cc", "g++", "clang", "make", "pip", "pip3")


class Step(NamedTuple):
    """One instruction."""

    word: str
    rest: str


class Image(NamedTuple):
    """What is left when all steps are done."""

    root: Path
    user: str
    command: tuple[str, ...]
    environment: dict[str, str]


def steps(text: str) -> Iterator[Step]:
    """Raises ValueError on an instruction that is not known."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in filter(None, (line.strip() for line in lines.replace("\\\n", " ").splitlines())):
        word, _, rest = line.partition(" ")
        if word not in KNOWN:
            raise ValueError(f"{word}: not known here")
        yield Step(word, rest.strip())


def build(root: Path) -> Image:
    """Raises CalledProcessError, ValueError."""
    tools = root / "tools"  # where the base image has its python
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
    assert copied == {"/opt/epp"}, f"what the last stage takes from the first: {copied}"
    return Image(root, user, tuple(inside(part, root) for part in command), environment)


def inside(text: str, root: Path) -> str:
    """The image's paths as they are here."""
    return re.sub(rf"(?<![\w./-])({'|'.join(PLACES)})\b", lambda match: f"{root}{match[1]}", text)


def copy(words: Sequence[str], root: Path, folder: Path) -> set[str]:
    """From the repository; what comes from another stage is there already, at the same path. Says what that was."""
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
    """What the image's `epp` says to it, as the image's user. Raises CalledProcessError."""
    command = [*as_user(image), image.command[0], *(inside(argument, image.root) for argument in arguments)]
    environment = image.environment | {"HOME": "/nonexistent"}
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout


def as_user(image: Image) -> list[str]:
    """Only root can become somebody else."""
    if os.getuid() or not shutil.which("setpriv"):
        return []
    user, _, group = image.user.partition(":")
    return ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--bounding-set=-all", "--no-new-privs"]


def read_only(image: Image) -> list[str]:
    """Before a command: a root file system that cannot be written, and a /dev/shm of its own. Empty: not to be had here."""
    mounts = "mount -o remount,bind,ro / && mount -t tmpfs -o size=64m,mode=1777 shm /dev/shm"
    if (
        os.getuid()
        or subprocess.run(["unshare", "--mount", "sh", "-c", mounts], capture_output=True, check=False).returncode
    ):
        return []
    hidden = f"mount --bind {image.root} {image.root} && mount -o remount,bind,ro {image.root}"
    return ["unshare", "--mount", "sh", "-c", f'{mounts} && {hidden} && exec "$@"', "sh"]


def serve(image: Image) -> str:
    """Start it as its user, wait until it is ready, end it; how it was done. Raises AssertionError."""
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
        _, said = picker.communicate(timeout=READY_S)
    assert ready and picker.returncode == 0, f"exit {picker.returncode}: {said[-3000:]}"
    return (
        "nothing writable but /dev/shm"
        if confined
        else "as it is: this machine lets nobody make a file system read-only"
    )


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def superfluous(image: Image) -> list[str]:
    """Compilers and installers that are left in the image."""
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
        print(f"epp check: fine; epp manifests: {objects} objects; epp serve: ready with {serve(image)}")
        if left := superfluous(image):
            print("\n".join(["FAILED: not needed to serve:", *left]))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
