"""`make test-arm`: the tests of `epp` and `shm`, the hammer of shared memory, and one routed request, on aarch64.

The processor is emulated by qemu-user, with Debian's arm64 Python and the wheels of the lock file for aarch64. All of it is interpreted,
and many times slower than the machine itself. Emulation shows that layouts, byte order, wheels and system calls fit. It cannot show the
memory order of a real processor: `tests/shm/test_memory_order.py` checks that on a model.

`--smoke` runs the hammer and the tests of memory order, locks and layouts only. `ARGS='tests/shm -k seqlock'` runs other tests.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent.parent
FOLDER: Final = HERE / ".cache" / "arm64"
ROOT: Final = FOLDER / "root"
WHEELS: Final = FOLDER / "wheels"
PYTHON: Final = ROOT / "usr" / "bin" / "python3.11"
EMULATOR: Final = "qemu-aarch64-static"
TOOLS: Final = {EMULATOR: "qemu-user-static", "mmdebstrap": "mmdebstrap"}  # program -> Debian package
PACKAGES: Final = "python3-minimal,libpython3-stdlib,libstdc++6"
MACHINES_OWN: Final = ("dev", "proc", "run", "sys", "tmp")  # paths that the emulator finds in the root lead there, and not to the machine's
EMULATED: Final = HERE / "tests" / "emulated"
LOCK: Final = HERE / "requirements-dev.txt"
# What the tests of `epp` and `shm` import, and the picker. The lock file names their dependencies and hashes.
_WANTED = """
    aiohappyeyeballs aiohttp aiosignal attrs cffi click common-expression-language cryptography execnet frozenlist h11 h2 hpack
    hyperframe hypothesis idna iniconfig msgspec multidict numpy packaging pluggy prometheus-client propcache protobuf pycparser
    pygments pytest pytest-timeout pytest-xdist pyyaml sortedcontainers structlog trustme typing-extensions uvloop xxhash yarl zstandard
"""
WANTED: Final = frozenset(_WANTED.split())
PLATFORMS: Final = ("manylinux_2_34_aarch64", "manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
REGISTER: Final = Path("/proc/sys/fs/binfmt_misc")
# The kernel starts a program with the emulator if its first bytes are an ELF header of 64 bits for aarch64.
MAGIC: Final = (
    rb":qemu-aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    rb":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:%s:OCF"
)
SMOKE: Final = ("tests/shm/test_fence.py", "tests/shm/test_memory_order.py", "tests/shm/test_seqlock.py", "tests/shm/test_layout.py")


def say(text: str) -> None:
    print(f"── {text}", flush=True)


def need_tools() -> None:
    """Installs the emulator and mmdebstrap if they are missing. Ends the process with a message if that is not possible."""
    missing = [package for program, package in TOOLS.items() if shutil.which(program) is None]
    if not missing:
        return
    if os.geteuid() or shutil.which("apt-get") is None:
        raise SystemExit(f"test-arm needs {', '.join(missing)}: as root, apt-get install {' '.join(missing)}")
    say(f"installing {', '.join(missing)}")
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], check=True, stdout=subprocess.DEVNULL)


def register_emulator() -> None:
    """Makes the kernel start arm64 programs with the emulator, so that tests can start Python again. Needs root, once per boot."""
    if (REGISTER / "qemu-aarch64").exists():
        return
    if os.geteuid():
        raise SystemExit("test-arm must register the emulator with the kernel once per boot: run it once as root")
    if not (REGISTER / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", str(REGISTER)], check=True)
    emulator = shutil.which(EMULATOR)
    assert emulator is not None
    (REGISTER / "register").write_bytes(MAGIC % os.fsencode(os.path.realpath(emulator)))


def unpack_python() -> None:
    """Unpacks Debian's arm64 Python. No script of a package runs, so this needs no emulation."""
    if PYTHON.exists():
        return
    say("unpacking Python for arm64")
    FOLDER.mkdir(parents=True, exist_ok=True)
    unfinished = FOLDER / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    command = ["mmdebstrap", "--quiet", "--arch=arm64", "--variant=extract", f"--include={PACKAGES}", "bookworm", str(unfinished)]
    subprocess.run(command, check=True)
    for name in MACHINES_OWN:
        shutil.rmtree(unfinished / name, ignore_errors=True)  # some releases of mmdebstrap make none
    unfinished.rename(ROOT)


def locked(names: Set[str]) -> str:
    """The entries of the lock file for these packages, with their hashes."""
    entries = re.split(r"^(?=[a-z0-9])", LOCK.read_text(), flags=re.MULTILINE)
    named = [(re.split(r"[=\[ ;]", entry, maxsplit=1)[0], entry) for entry in entries if "==" in entry]
    if missing := set(names) - {name for name, _ in named}:
        raise SystemExit(f"{LOCK.name} does not name {', '.join(sorted(missing))}")
    return "".join(entry for name, entry in named if name in names)


def install_wheels() -> None:
    """Installs the locked wheels for aarch64, unless that was done with the same lock file."""
    wanted = locked(WANTED)
    stamp = WHEELS / "locked.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    say("installing wheels for aarch64")
    shutil.rmtree(WHEELS, ignore_errors=True)
    WHEELS.mkdir(parents=True)
    requirements = FOLDER / "requirements.txt"
    requirements.write_text(wanted)
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--implementation=cp", "--python-version=3.11", *platforms]
    subprocess.run([*command, "--target", str(WHEELS), "--requirement", str(requirements)], check=True)
    stamp.write_text(wanted)


def emulated(arguments: Sequence[str], adapted: bool) -> int:
    """Runs Python with these arguments on aarch64. Returns its exit code. `adapted`: pickers can start (tests/emulated)."""
    environment = os.environ | {
        "QEMU_LD_PREFIX": str(ROOT),
        "PYTHONPATH": ":".join(map(str, [*([EMULATED] if adapted else []), HERE, WHEELS])),
        "PYTHONPYCACHEPREFIX": str(FOLDER / "pycache"),
        "EPP_COMPILED": "0",
        "CI": "1",  # fixed seeds, fewer examples
    }
    return subprocess.run([EMULATOR, str(PYTHON), *arguments], env=environment, cwd=HERE, check=False).returncode


def run(name: str, arguments: Sequence[str], adapted: bool = False) -> bool:
    """Runs one step and says how it ended. Returns whether it succeeded."""
    say(name)
    start = time.monotonic()
    code = emulated(arguments, adapted)
    say(f"{name}: {'passed' if code == 0 else f'FAILED with {code}'} after {time.monotonic() - start:.0f} s")
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-arm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few minutes: hammer, memory order, locks, layouts")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests")
    parser.add_argument("tests", nargs="*", default=[], help="arguments of pytest; default: tests/epp tests/shm")
    options, further = parser.parse_known_args()
    need_tools()
    register_emulator()
    unpack_python()
    install_wheels()
    tests = [*(options.tests or (SMOKE if options.smoke else ("tests/epp", "tests/shm"))), *further]
    pytest = ["-m", "pytest", "-q", "-o", f"cache_dir={FOLDER / 'pytest'}", "-o", "timeout=1200", "-o", "faulthandler_timeout=600"]
    passed = [
        run("the machine", ["-c", "import platform, shm.fence; print(shm.fence.promise(), 'on', platform.python_version())"]),
        run("hammer of shared memory", ["-m", "tests.shm.hammer", "--reads", "20000" if options.smoke else "1000000"]),
        run("tests", [*pytest, *(("-n", str(options.jobs), "--dist", "worksteal") if options.jobs else ()), *tests]),
    ]
    if not options.tests and not options.smoke:
        passed.append(run("a picker routes a request", ["-m", "tests.field", "deploy/config", "--only", "default.yaml"], adapted=True))
    return not all(passed)


if __name__ == "__main__":
    sys.exit(main())
