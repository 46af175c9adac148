"""Starts a real redis-server on loopback, without persistence, for the tests of replicas."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import pytest

from loadtest.demo.ports import free_ports

PROGRAMS = ("redis-server", "valkey-server")
STARTS_MAX = 5  # of a server, if its port is taken meanwhile
READY_S = 30.0
POLL_S = 0.01
LOOPBACK = "127.0.0.1"


def program() -> str | None:
    """Returns the path of redis-server or valkey-server; None: neither is installed."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


needs_redis = pytest.mark.skipif(program() is None, reason="needs redis-server: apt-get install redis-server")


class RedisServer:
    """A redis-server. `settings`: further lines of its configuration, such as `requirepass secret`.

    `password`: with which `command` logs in; at first that of the settings.
    `port`: on loopback; it stays the same over restarts. `socket_path`: its Unix socket. With `tls_port` in the settings, `port` is
    plaintext beside it.
    """

    def __init__(self, directory: Path, *settings: str, port: int = 0) -> None:
        path = program()
        assert path is not None, "neither redis-server nor valkey-server is installed"
        self._program = path
        self._settings = settings
        self._settled = port != 0  # whether the port was given, or the server has listened on it
        self._directory = directory
        self.port = port
        self.socket_path = directory / "redis.sock"
        self.log = directory / "redis.log"
        self.password = next((line.split()[1] for line in settings if line.startswith("requirepass ")), "")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.resume()
        self.kill()

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts the server, empty, and waits until it answers. Raises AssertionError with its last lines."""
        for _ in range(STARTS_MAX):
            if not self._settled:
                (self.port,) = free_ports(1)
            self._launch()
            if self._answers():
                self._settled = True
                return
        raise AssertionError(f"redis-server does not start:\n{self.log.read_text()[-2000:]}")

    def kill(self) -> None:
        """Ends the server with SIGKILL, so that it says goodbye to no client."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """Stops the process: connections stay open, and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def command(self, *words: str | bytes) -> bytes:
        """Sends one command over the Unix socket. Returns the raw answer, at least its first line."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(READY_S)
            connection.connect(str(self.socket_path))
            parts = [word.encode() if isinstance(word, str) else word for word in words]
            if self.password:
                connection.sendall(_encoded([b"AUTH", self.password.encode()]))
                connection.recv(1 << 20)
            connection.sendall(_encoded(parts))
            answer = connection.recv(1 << 20)
        return answer

    def _launch(self) -> None:
        self.socket_path.unlink(missing_ok=True)
        configuration = self._directory / "redis.conf"
        configuration.write_text(
            f'bind {LOOPBACK}\nport {self.port}\nunixsocket {self.socket_path}\nsave ""\nappendonly no\n'
            f"dir {self._directory}\n" + "".join(f"{line}\n" for line in self._settings)
        )
        with self.log.open("ab") as output:
            self._process = subprocess.Popen([self._program, str(configuration)], stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def _answers(self) -> bool:
        """Waits until the server answers a PING, if only with the demand for a password. False: it ended."""
        assert self._process is not None
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return False
            try:
                if self.command("PING"):
                    return True
            except OSError:
                time.sleep(POLL_S)
        return False

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)


def _encoded(parts: list[bytes]) -> bytes:
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
