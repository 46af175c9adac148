"""Runs a picker as systemd does with a socket unit: holds the socket of its --grpc-port, and restarts it at SIGHUP.

python -m tests.e2e.activation epp serve --grpc-port=9002 ...
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

FIRST = 3
BACKLOG = 4096
OBEYED = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


def started(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts the picker with the socket at descriptor FIRST."""
    environment = {**os.environ, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "grpc"}
    shell = ["sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh"]
    return subprocess.Popen([*shell, *argv], env=environment, pass_fds=[FIRST])


def main(argv: Sequence[str]) -> int:
    """Runs the picker until a signal ends it or it ends by itself. Returns its exit code."""
    port = next(int(flag.partition("=")[2]) for flag in argv if flag.startswith("--grpc-port="))
    held = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    os.dup2(held.detach(), FIRST)
    signal.pthread_sigmask(signal.SIG_BLOCK, OBEYED)
    picker = started(argv)
    while picker.poll() is None:
        number = signal.sigwait(OBEYED)
        if number == signal.SIGCHLD:
            continue
        picker.terminate()
        picker.wait()
        if number == signal.SIGHUP:
            picker = started(argv)
    return picker.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
