"""Binds the listening sockets, or takes those of systemd. The parent does this before the first fork. Each child closes the sockets
that it does not use.

ext_proc   for workers: all of them accept from this socket, or each worker binds the same port itself (`hold`)
health     for the supervisor
metrics    for the supervisor

systemd keeps its sockets open while the picker restarts: connections wait, and none is refused. systemd describes the sockets in
environment variables, and passes them as descriptors from FIRST_PASSED on, in the order of the names:

    LISTEN_PID: for which process | LISTEN_FDS: how many | LISTEN_FDNAMES: their names, separated by colons

The names are the names of ports in `Sockets.ports`: FileDescriptorName= in the .socket unit. The picker itself binds ports without a
socket.
"""

import contextlib
import errno
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from workers.process import StartError, Unusable

if TYPE_CHECKING:
    from workers.host.options import Options

NO_PORTS: Final[Mapping[int, str]] = {}
OF_POOL: Final = "pool "  # begins the names of the ports of pools
_ANY: Final[Mapping[int, str]] = {socket.AF_INET6: "::", socket.AF_INET: "0.0.0.0"}
FIRST_PASSED: Final = 3
NAMES: Final = ("grpc", "health", "metrics")
VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
UNIT: Final = "in the .socket unit"
BACKLOG = 4096  # connections that wait for `accept`; the kernel takes at most net.core.somaxconn


class Sockets(NamedTuple):
    """The sockets on which the picker listens. `activated`: whether systemd also holds the ext_proc socket, and keeps it for the next
    picker.

    `pools`: further ext_proc sockets, at the ports of pools. `later`: ext_proc sockets that get their ports while the picker runs
    (`open_at`). All processes share these sockets, so after the supervisor has bound one, every worker can accept from it.
    """

    ext_proc: socket.socket
    health: socket.socket
    metrics: socket.socket
    activated: bool = False
    pools: Sequence[socket.socket] = ()
    later: Sequence[socket.socket] = ()

    @classmethod
    def bind(cls, options: "Options", given: Mapping[str, socket.socket], pools: Mapping[int, str] = NO_PORTS, later: int = 0) -> "Sockets":
        """Binds the sockets that are not `given` (`received`), and the ports of `pools`: port -> name. If this fails, closes all of them
        and raises StartError. `later`: the number of sockets that get their ports later.
        """
        native = options.transport == "native"
        with contextlib.ExitStack() as undo:
            for found in given.values():
                undo.enter_context(found)
            if "grpc" in given and not native:
                raise Unusable(
                    f"--transport {options.transport} binds its port itself and cannot use the socket 'grpc' of systemd: "
                    "use --transport native, or disable the .socket unit"
                )

            def bound(name: str, port: int, flag: str) -> socket.socket:
                if name in given:
                    check_port(given[name], name, port, flag)
                    return given[name]
                serve = listen if native or name != "grpc" else hold
                return undo.enter_context(serve(port, flag))

            sockets = cls(
                bound("grpc", options.grpc_port, "--grpc-port"),
                bound("health", options.grpc_health_port, "--grpc-health-port"),
                bound("metrics", options.metrics_port, "--metrics-port"),
                activated="grpc" in given,
                pools=[undo.enter_context(listen(port, f"pool {name}")) for port, name in pools.items()],
                later=[undo.enter_context(_unbound(family)) for family in [_family()] * later],
            )
            undo.pop_all()
        return sockets

    def ports(self) -> dict[str, int]:
        """Returns name ("grpc", "health", "metrics") -> port number."""
        named = {"grpc": self.ext_proc, "health": self.health, "metrics": self.metrics}
        return {name: bound.getsockname()[1] for name, bound in named.items()}

    def pool_ports(self) -> dict[str, int]:
        """Returns `pool N` -> port number, for the N-th port of a pool."""
        return {f"{OF_POOL}{number}": bound.getsockname()[1] for number, bound in enumerate(self.pools, 1)}

    def not_for_worker(self) -> list[int]:
        """Descriptors that a worker must not hold."""
        return [self.health.fileno(), self.metrics.fileno()]

    def not_for_kv_events(self) -> list[int]:
        """Descriptors that the kv-events process must not hold."""
        return [*self.not_for_supervisor(), *self.not_for_worker(), *(each.fileno() for each in self.later)]

    def not_for_supervisor(self) -> list[int]:
        """Descriptors that the supervisor must not hold."""
        return [self.ext_proc.fileno(), *(each.fileno() for each in self.pools)]


def listen(port: int, flag: str) -> socket.socket:
    """Opens a listening socket for all addresses of this machine. The socket does not share its port, so a second picker cannot bind the
    port.

    Raises StartError.
    """
    return _bound_to_all(port, flag, listening=True)


def hold(port: int, flag: str) -> socket.socket:
    """Opens a socket that reserves a port. Children listen there with their own sockets and SO_REUSEPORT. Raises StartError.

    The bind does not share the port, so the bind fails if the port is in use. Afterwards the socket shares its port. From then on, only
    sockets of this user with SO_REUSEPORT get the port, even while no child listens.
    """
    reserved = _bound_to_all(port, flag, listening=False)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return reserved


def open_at(later: socket.socket, port: int) -> str:
    """Lets a socket without a port listen at `port`, in all processes that share the socket. Returns "", or why it cannot listen."""
    try:
        later.bind((_ANY[later.family], port))
        later.listen(BACKLOG)
    except OSError as refused:
        return _not_bound(port, "of the InferencePool", refused, "the InferencePool")
    return ""


def listens(opened: socket.socket) -> bool:
    """Returns whether a socket listens."""
    return bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _bound_to_all(port: int, flag: str, *, listening: bool) -> socket.socket:
    try:
        return _bound(socket.AF_INET6, port, listening)
    except OSError as refused:
        if refused.errno in (errno.EADDRINUSE, errno.EACCES):
            raise StartError(_not_bound(port, flag, refused)) from refused
    try:
        return _bound(socket.AF_INET, port, listening)  # a machine without IPv6
    except OSError as refused:
        raise StartError(_not_bound(port, flag, refused)) from refused


def _bound(family: socket.AddressFamily, port: int, listening: bool) -> socket.socket:
    bound = _unbound(family)
    try:
        bound.bind((_ANY[family], port))
        if listening:
            bound.listen(BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound


def _unbound(family: socket.AddressFamily) -> socket.socket:
    unbound = socket.socket(family, socket.SOCK_STREAM)
    try:
        unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT do not block the port
        if family == socket.AF_INET6:
            unbound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        unbound.setblocking(False)
    except OSError:
        unbound.close()
        raise
    return unbound


def _family() -> socket.AddressFamily:
    """Returns the family of sockets for all addresses of this machine."""
    try:
        _bound(socket.AF_INET6, 0, listening=False).close()
    except OSError:
        return socket.AF_INET  # a machine without IPv6
    return socket.AF_INET6


def _not_bound(port: int, flag: str, refused: OSError, changed: str = "") -> str:
    """Says why a port cannot be bound. `changed`: what needs another port; "" means the flag."""
    changed = changed or flag
    if refused.errno == errno.EADDRINUSE:
        return (
            f"port {port} ({flag}) is in use: another picker listens there, perhaps one that still drains, or another program "
            f"(`ss -ltnp 'sport = :{port}'` names it); end it, or give {changed} another port"
        )
    if refused.errno == errno.EACCES:
        return f"port {port} ({flag}): this user may not listen there; give {changed} a port above 1023"
    return f"port {port} ({flag}): the system refuses to bind it: {refused}"


def received(environ: MutableMapping[str, str]) -> dict[str, socket.socket]:
    """Returns the sockets that systemd has passed to this process, by name, and removes systemd's variables. Raises Unusable."""
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
        found = {name: undo.enter_context(_passed(FIRST_PASSED + number, name)) for number, name in enumerate(names)}
        for name, sock in found.items():
            _check_passed(sock, name)
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


def _passed(descriptor: int, name: str) -> socket.socket:
    try:
        found = socket.socket(fileno=descriptor)
    except OSError as refused:
        raise Unusable(f"descriptor {descriptor} of LISTEN_FDS ('{name}') is no socket: {refused.strerror}") from refused
    found.setblocking(False)
    os.set_inheritable(descriptor, False)
    return found


def _check_passed(found: socket.socket, name: str) -> None:
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
        raise Unusable(f"the socket '{name}' of systemd is no TCP socket: give its port to ListenStream= {UNIT}")
    if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise Unusable(f"the socket '{name}' of systemd does not listen: set Accept=no {UNIT}")
