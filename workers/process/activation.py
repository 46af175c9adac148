"""Receives listening sockets from systemd, which keeps them open while the picker restarts: connections wait, and none is refused.

    environment       LISTEN_PID: for which process | LISTEN_FDS: how many | LISTEN_FDNAMES: their names, separated by colons
    descriptors       from FIRST on, in the order of the names

A name is that of a port in `Sockets.ports`: FileDescriptorName= in the .socket unit. The picker binds the ports without a socket itself.
"""

import contextlib
import os
import socket
from collections.abc import MutableMapping
from typing import Final

from workers.process import Unusable

FIRST: Final = 3
NAMES: Final = ("grpc", "health", "metrics")
VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
UNIT: Final = "in the .socket unit"


def received(environ: MutableMapping[str, str]) -> dict[str, socket.socket]:
    """Takes the sockets that systemd has passed to this process, by name, and removes the variables. Raises Unusable."""
    pid, count, named = (environ.pop(variable, "") for variable in VARIABLES)
    if pid != str(os.getpid()):
        return {}
    names = named.split(":") if named else []
    if count != str(len(names)):
        raise Unusable(
            f"systemd passes {count or 'no'} sockets (LISTEN_FDS) and {len(names)} names (LISTEN_FDNAMES): each socket needs one; "
            f"set FileDescriptorName= {UNIT}"
        )
    if unknown := [name for name in names if name not in NAMES]:
        raise Unusable(
            f"systemd passes a socket with the name '{unknown[0]}'; the names are {', '.join(NAMES)}: set FileDescriptorName= {UNIT}"
        )
    if repeated := [name for name in NAMES if names.count(name) > 1]:
        raise Unusable(f"systemd passes {names.count(repeated[0])} sockets with the name '{repeated[0]}': leave one {UNIT}")
    with contextlib.ExitStack() as undo:
        found = {name: undo.enter_context(_socket(FIRST + number, name)) for number, name in enumerate(names)}
        for name, sock in found.items():
            _check(sock, name)
        undo.pop_all()
    return found


def check_port(found: socket.socket, name: str, port: int, flag: str) -> None:
    """Checks that a socket of systemd listens on the port of its flag. Raises Unusable."""
    bound = found.getsockname()[1]
    if port not in (0, bound):
        raise Unusable(
            f"the socket '{name}' of systemd listens on port {bound}, and {flag} is {port}: set ListenStream={port} {UNIT}, "
            f"or give the picker {flag} {bound}"
        )


def _socket(descriptor: int, name: str) -> socket.socket:
    try:
        found = socket.socket(fileno=descriptor)
    except OSError as refused:
        raise Unusable(f"descriptor {descriptor} of LISTEN_FDS ('{name}') is no socket: {refused.strerror}") from refused
    found.setblocking(False)
    os.set_inheritable(descriptor, False)
    return found


def _check(found: socket.socket, name: str) -> None:
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
        raise Unusable(f"the socket '{name}' of systemd is no TCP socket: give its port to ListenStream= {UNIT}")
    if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise Unusable(f"the socket '{name}' of systemd does not listen: set Accept=no {UNIT}")
