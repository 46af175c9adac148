"""Faults of replicas and their store, with real processes: `python -m tests.faults.replicas [--short] [--only NAME ...]`.

Three pickers with a redis-server, requests through an Envoy over two of them all the time. Each fault must cause no failed request. The
replicas must forget what they cannot hear, and find each other again when the fault is over. The exit code is 1 if a request failed.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from tests.faults.replica_world import CHANNEL, PASSWORD, Held, Traffic, World
from workers.replicas.wire import FORM

PAUSE_S, SHORT_PAUSE_S = 10.0, 1.5  # of a stopped replica and a silent store
SILENT_S = 3.0  # by then, replicas have noticed a silent store
PARTITION_S = 60.0  # without --short
LIES = 300
HUGE = 1 << 60
MEMORY_MAX_KB = 64 << 10  # how much a lying store may add to a picker


def killed_store(world: World, pause_s: float) -> None:
    """kill -9 of the store. It comes back empty."""
    world.store.kill()
    world.faded(world.remotes)
    time.sleep(pause_s / 4)
    world.store.start()


def killed_replica(world: World, pause_s: float) -> None:
    """kill -9 of a replica with requests in flight. Its successor has the same name."""
    with Held(world.victim):
        world.counted()
        world.victim.child.kill_group()
        world.victim.child.process.wait()
    world.forgotten()
    world.replace_victim()


def stopped_replica(world: World, pause_s: float) -> None:
    """SIGSTOP of a replica with requests in flight. Its old sums count no more when it goes on."""
    with Held(world.victim):
        world.counted()
        stopped = [world.victim.child.pid, *children(world.victim.child.pid)]
        try:
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            world.forgotten()
            time.sleep(pause_s)
        finally:
            for pid in reversed(stopped):
                os.kill(pid, signal.SIGCONT)


def silent_store(world: World, pause_s: float) -> None:
    """CLIENT PAUSE: the store accepts everything and answers nothing."""
    until = time.monotonic() + pause_s + SILENT_S
    world.store.command("CLIENT", "PAUSE", str(round(1000 * (pause_s + SILENT_S))), "ALL")
    world.faded(world.remotes)
    time.sleep(max(until - time.monotonic(), 0.0))


def frozen_store(world: World, pause_s: float) -> None:
    """SIGSTOP of the store: the kernel accepts connections for it, and nothing answers."""
    world.store.pause()
    try:
        world.faded(world.remotes)
        time.sleep(pause_s)
    finally:
        world.store.resume()


def partition(world: World, pause_s: float) -> None:
    """One replica does not reach the store: nothing arrives in either direction."""
    world.proxy.drops = True
    world.faded(world.remotes[:1])
    world.others[1].requests()
    time.sleep(pause_s)
    world.proxy.drops = False


def full_store(world: World, pause_s: float) -> None:
    """maxmemory of 1 MB: the store takes no more data. Messages pass all the same."""
    world.store.command("CONFIG", "SET", "maxmemory", "1mb")
    world.store.command("CLIENT", "KILL", "TYPE", "pubsub")
    world.recovered()
    world.store.command("CONFIG", "SET", "maxmemory", "0")


def wrong_password(world: World, pause_s: float) -> None:
    """The password changes under the replicas, and then back."""
    world.store.command("CONFIG", "SET", "requirepass", "another")
    world.store.password = "another"
    for kind in ("normal", "pubsub"):
        world.store.command("CLIENT", "KILL", "TYPE", kind)
    world.faded(world.remotes)
    world.store.command("CONFIG", "SET", "requirepass", PASSWORD)
    world.store.password = PASSWORD


def denied(world: World, pause_s: float) -> None:
    """An ACL that forbids to publish and to listen."""
    world.store.command("ACL", "SETUSER", "default", "resetchannels", "-publish", "-subscribe")
    for kind in ("normal", "pubsub"):
        world.store.command("CLIENT", "KILL", "TYPE", kind)
    world.faded(world.remotes)
    world.store.command("ACL", "SETUSER", "default", "allchannels", "+@all")


def lies(world: World, pause_s: float) -> None:
    """A store that lies: garbage, foreign forms, negative, huge and endless numbers, many names, replayed messages."""
    before = {pid: memory_kb(pid) for picker in world.site.pickers for pid in children(picker.child.pid)}
    for message in [*lying(), *lying()]:
        world.store.command("PUBLISH", CHANNEL, message)
    least = min(remote.least() for remote in world.remotes)
    assert least >= 0, f"an endpoint has {least} requests in flight"
    for pid, kb in before.items():
        grown = memory_kb(pid) - kb
        assert grown < MEMORY_MAX_KB, f"process {pid} has grown by {grown} KB"


def stolen_name(world: World, pause_s: float) -> None:
    """A store that lets another speak for a replica, with the highest number: the replica is silent, and nobody counts it for a while."""
    message = msgspec.msgpack.encode([FORM, "replica-0", HUGE, 1, HUGE, True, 7, b"", None])
    world.store.command("PUBLISH", CHANNEL, message)
    world.ignored()


def lying() -> list[bytes]:
    """Messages that no replica sends: the array of `workers.replicas.wire` with wrong values."""
    encode = msgspec.msgpack.encode
    rows = b"\xff" * 20 * 50
    good = [FORM, "liar", 1, 1, 1, True, 7, b"", None]
    wrong: list[object] = [
        [99, *good[1:]], {"form": 1}, [], good[:4], [FORM, "", *good[2:]], [FORM, "x" * 5000, *good[2:]],
        [FORM, "replica-1", -5, -5, -5, True, -7, rows, None],
        [*good[:7], b"odd", None], [*good, [rows * 5000, rows, rows]], [*good, [b"", b"", rows]], [*good[:8], [HUGE] * 20],
    ]  # fmt: skip
    many = [[FORM, f"liar-{n}", n, n, n, True, 7, rows, None] for n in range(LIES)]
    return [b"", b"\xc1", os.urandom(200), b"\x92" * 100_000, b"\xdd\xff\xff\xff\xff", bytes(2 << 20), *map(encode, [*wrong, *many])]


def children(pid: int) -> list[int]:
    """Returns the direct children of a process."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(number) for number in file.read().split()]


def memory_kb(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


PAUSES = {"partition": PARTITION_S}
LONG = ("stolen name",)  # others forget a number only after half a minute
FAULTS: dict[str, Callable[[World, float], None]] = {
    "killed store": killed_store,
    "killed replica": killed_replica,
    "stopped replica": stopped_replica,
    "silent store": silent_store,
    "frozen store": frozen_store,
    "partition": partition,
    "full store": full_store,
    "wrong password": wrong_password,
    "denied": denied,
    "lies": lies,
    "stolen name": stolen_name,
}


def main(arguments: Sequence[str] | None = None) -> int:
    line = argparse.ArgumentParser(prog="replicas", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument(
        "--short", action="store_true", help=f"pauses of {SHORT_PAUSE_S} s instead of {PAUSE_S:.0f}, and {PARTITION_S:.0f} for a partition"
    )
    line.add_argument("--only", nargs="*", choices=FAULTS, help="only these faults")
    options = line.parse_args(arguments)
    failed = 0
    with World() as world:
        for name in options.only or [name for name in FAULTS if not (options.short and name in LONG)]:
            with Traffic(world.site.port) as traffic:
                FAULTS[name](world, SHORT_PAUSE_S if options.short else PAUSES.get(name, PAUSE_S))
                seconds = world.recovered()
            failed += sum(traffic.failed.values())
            failures = ", ".join(f"{count} {ending}" for ending, count in traffic.failed.items()) or "no request failed"
            print(f"{name:18} {traffic.endings['200']:6} answered, {failures}; all know each other after {seconds:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
