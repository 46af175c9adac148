"""Follows docs/installation.md with the files of a release, each way in a Debian root that has nothing else.

    python -m tests.release.installed dist              pip, pipx, uv tool and systemd
    python -m tests.release.installed dist --way pip --suite bookworm

A root has the Debian packages of its way, the files of the release, and this machine's certificates and registry settings. The commands
of the page run there as they stand. The last ones route a request, in a network of their own, so the default ports are free. For `systemd`
the root boots with systemd as its first process, in a container of systemd-nspawn.

Needs root, and on Debian: apt install mmdebstrap systemd-container.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from release.source import ROOT
from tests.first_day import blocks

PAGE: Final = "docs/installation.md"
ROUTED: Final = "A routed request"
FROM_HOST: Final = ("/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt")
KEPT: Final = ("PIP_", "SSL_CERT_", "REQUESTS_CA_")  # beginnings of the names of variables that the root's programs get
STEP_S: Final = 900.0
BOOT_S: Final = 60.0
POLL_S: Final = 0.5
SHOWN_CHARS: Final = 4000
SAID: Final = ("epp ", '{"id"', "sent to ", "ActiveState=", "User=", "→ Overall")  # beginnings of the lines that are shown
SERVED: Final = "until curl --silent --fail http://127.0.0.1:9090/readyz; do sleep 0.2; done"


class Way(NamedTuple):
    """One way to install. `section`: its heading; `before`: what the page takes for granted; `only`: of the commands."""

    section: str
    packages: str
    path: str
    before: str = ""
    only: str = ""


WAYS: Final = {
    "pip": Way("pip", "python3-venv", "/opt/epp/bin"),
    "pipx": Way("pipx or uv tool", "pipx", "/root/.local/bin", only="pipx"),
    "uv": Way("pipx or uv tool", "pipx", "/root/.local/bin", before="pipx install uv", only="uv"),
    "systemd": Way("systemd", "python3-venv,systemd,systemd-sysv,dbus", "/opt/epp/bin", before="pip"),
}


class Failed(Exception):
    """A command of the page fails."""


def commands(section: str, only: str = "") -> list[str]:
    """Returns the blocks of commands of a section of the page. `only`: the word with which its lines begin."""
    text = (ROOT / PAGE).read_text()
    (body,) = [part.partition("\n")[2] for part in text.split("\n## ") if part.startswith(f"{section}\n")]
    found = [block.text for block in blocks(PAGE, body)]
    return ["\n".join(line for line in block.splitlines() if line.startswith(only)) for block in found]


class Root:
    """A Debian root file system in a folder."""

    def __init__(self, folder: Path, suite: str, packages: str, release: Path) -> None:
        self.folder = folder
        include = f"--include=ca-certificates,curl,{packages}"
        _run(["mmdebstrap", "--quiet", "--variant=minbase", include, suite, str(folder)])
        shutil.copytree(release, folder / "root/dist")
        for name in FROM_HOST:
            (folder / name[1:]).unlink(missing_ok=True)
            shutil.copyfile(name, folder / name[1:])

    def run(self, text: str, path: str, network: bool) -> str:
        """Runs commands as root, in the home folder. Without `network` they reach loopback only. Returns their output. Raises Failed."""
        self._write(text)
        space = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *([] if network else ["--net"])]
        enter = f"mount -t proc proc {self.folder}/proc; mount --rbind /dev {self.folder}/dev; "
        enter += "" if network else "ip link set lo up; "
        enter += f"exec chroot {self.folder} bash /commands.sh"
        environment = {"PATH": f"{path}:/usr/local/bin:/usr/bin:/bin:/usr/sbin", "HOME": "/root", "LANG": "C.UTF-8"}
        environment |= {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
        return _run([*space, "bash", "-c", enter], environment | {"PIP_FIND_LINKS": ""})

    def boot(self, text: str) -> str:
        """Boots the root, runs commands in it, and ends it. Returns their output. Raises Failed."""
        name = f"epp-{os.getpid()}"
        command = ["systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit", "--private-network"]
        command += [f"--directory={self.folder}", f"--machine={name}", "--console=read-only"]
        self._write(text)
        with (self.folder.parent / "console").open("wb") as console:
            machine = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT)
        try:
            first = self._first(machine)
            inside = ["nsenter", f"--target={first}", "--mount", "--pid", "--net", "--ipc", "--uts", "--root", "--wdns=/"]
            deadline = time.monotonic() + BOOT_S
            while subprocess.run([*inside, "systemctl", "is-active", "multi-user.target"], capture_output=True).returncode:
                if time.monotonic() > deadline:
                    raise Failed("systemd did not start:\n" + (self.folder.parent / "console").read_text(errors="replace"))
                time.sleep(POLL_S)
            return _run([*inside, "bash", "/commands.sh"], {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin", "HOME": "/root"})
        finally:
            machine.terminate()
            machine.wait()

    def _write(self, text: str) -> None:
        """Writes the script of the commands. What it leaves running ends with it."""
        (self.folder / "commands.sh").write_text(f"trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\nset -e\ncd /root\n{text}\n")

    def _first(self, machine: "subprocess.Popen[bytes]") -> str:
        """Returns the process id of the container's first process. Raises Failed."""
        deadline = time.monotonic() + BOOT_S
        while time.monotonic() < deadline and machine.poll() is None:
            children = Path(f"/proc/{machine.pid}/task/{machine.pid}/children").read_text().split()
            for child in children:
                if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                    return child
            time.sleep(POLL_S)
        raise Failed("the container did not start:\n" + (self.folder.parent / "console").read_text(errors="replace"))


def follow(name: str, suite: str, release: Path, folder: Path) -> None:
    """Follows one way, to a routed request. Raises Failed."""
    way = WAYS[name]
    root = Root(folder / "root", suite, way.packages, release)
    fetch, route = commands(ROUTED)
    if name == "systemd":
        root.run("\n".join(commands("pip")), way.path, network=True)
        root.run(fetch, way.path, network=True)
        shutil.copyfile(ROOT / "deploy/config/default.yaml", root.folder / "root/config.yaml")
        (root.folder / "etc/epp").mkdir()
        shutil.copyfile(ROOT / "deploy/endpoints.yaml", root.folder / "etc/epp/endpoints.yaml")
        print(root.boot("\n".join([*commands(way.section), SERVED, f"PATH=$PATH:{way.path}", *SYSTEMD, _served(route)])))
        return
    root.run("\n".join([way.before, *commands(way.section, way.only)]), way.path, network=True)
    root.run(fetch, way.path, network=True)
    _show(root.run(f"epp --version\n{route}", way.path, network=False))


SYSTEMD: Final = (
    "systemctl show --property ActiveState,User,MainPID endpoint-picker",
    "systemd-analyze security --no-pager endpoint-picker | tail -1",
    "systemctl reload endpoint-picker",
)


def _show(output: str) -> None:
    for line in output.splitlines():
        if line.startswith(SAID):
            print(f"   {line}", flush=True)


def _served(route: str) -> str:
    """Returns the commands of a routed request without the one that starts a picker."""
    return "\n".join(line for line in route.splitlines() if not line.startswith("epp serve"))


def _run(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=STEP_S, errors="replace",
    )  # fmt: skip
    if done.returncode:
        raise Failed(f"{shlex.join(command)[:200]}: exit code {done.returncode}:\n{done.stdout[-SHOWN_CHARS:]}")
    return done.stdout


def main() -> int:
    line = argparse.ArgumentParser(prog="python -m tests.release.installed", description=(__doc__ or "").split("\n")[0])
    line.add_argument("release", type=Path, help="the folder with the files of a release")
    line.add_argument("--way", choices=WAYS, action="append", help="only this way; may be given several times")
    line.add_argument("--suite", default="trixie", help="the Debian release (%(default)s)")
    given = line.parse_args()
    failed = 0
    for name in given.way or WAYS:
        with tempfile.TemporaryDirectory(prefix="installed-") as folder:
            began = time.monotonic()
            try:
                follow(name, given.suite, given.release, Path(folder))
            except Failed as why:
                failed += 1
                print(f"── FAILED: {name}: {why}", flush=True)
            else:
                print(f"── {name} in Debian {given.suite}: a request was routed ({time.monotonic() - began:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
