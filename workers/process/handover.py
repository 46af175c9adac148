"""Upgrades a picker in place: the parent replaces its own program, and keeps its process id, children, sockets and shared memory.

    old parent ─ exec in a trial child ─▶ new program: takes everything over in a private copy, decides requests, says if it works
    old parent ─ exec ─▶ new parent: the same children ─▶ replaces them one by one (`renewal`)

An exec loses the memory of the process, so the old program passes a file in memory: numbers of descriptors, names of segments, how they are
laid out, the last good generations. The trial finds out whether the new program can take over. If it cannot, the old one continues, and
the upgrade needs a restart. Children of the old program go on until the new parent replaces them, so both programs read and write the same
words for a while. Segments that the new program lays out in another way are made anew (`workers.process.resumption`).
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Final, NoReturn

import msgspec

from workers.host.memory import Leaving
from workers.process.errors import StartError
from workers.process.instance import Instance
from workers.process.layout import LEAVING, Described, Names

VARIABLE: Final = "EPP_HANDOVER_DESCRIPTOR"
# The version of what both programs use at the same time besides segments: this message, words, roll, pipes and what goes through them.
# A program that expects another one does not take over.
FORM: Final = 2
BYTES_MAX: Final = 16 << 20


class Ends(msgspec.Struct, frozen=True, array_like=True):
    """The descriptors of `Pipes`: (reader, writer) of each pipe."""

    life: tuple[int, int]
    family: tuple[int, int]
    reports: tuple[int, int]
    bus: list[tuple[int, int]]
    kv_bus: list[tuple[int, int]]
    wakeups: list[int]

    def all(self) -> Iterator[int]:
        for pipe in (self.life, self.family, self.reports, *self.bus, *self.kv_bus):
            yield from pipe
        yield from self.wakeups


class Handover(msgspec.Struct, frozen=True, array_like=True):
    """What one program passes to the next.

    `segments`, `layouts`: the name of each segment, and how it is laid out, by its key in `Layout.plans`. `words`, `roll`, `lock`,
    `sockets`, `files`: descriptors. `kept`, `highest`, `names`: the state of `workers.process.reload`. `workers`: the wanted number of
    workers. `leaving`: the seats of workers that leave. `slot`: the file for the offer if a trial takes over; -1: the parent takes over.
    """

    form: int
    segments: dict[str, str]
    layouts: dict[str, Described]
    words: int
    roll: int
    lock: int
    sockets: list[int]
    files: list[int]
    pipes: Ends
    seed: int
    identity: str
    kept: list[tuple[int, int]]
    highest: int
    names: Names
    workers: int
    leaving: list[int]
    slot: int = -1

    def descriptors(self) -> Iterator[int]:
        """Yields all descriptors that the next program needs."""
        yield from (self.words, self.roll, self.lock, *self.sockets, *self.files)
        yield from self.pipes.all()


def gathered(
    instance: Instance,
    layouts: Mapping[str, Described],
    *,
    kept: Sequence[tuple[int, int]] = (),
    highest: int = 0,
    names: Names,
    workers: int = 0,
    slot: int = -1,
) -> Handover:
    """Collects what an instance passes on. `layouts`: `Layout.described` of the configuration in force. Others: as in `Handover`."""
    pipes, states = instance.pipes, instance.memory.lanes.scalars(LEAVING)
    return Handover(
        FORM,
        {part: segment.name for part, segment in instance.memory.segments.items()},
        dict(layouts),
        instance.words.file,
        instance.roll.file,
        instance.lock.descriptor,
        [sock.fileno() for sock in instance.sockets],
        instance.generations.files,
        Ends(pipes.life, pipes.family, pipes.reports, list(pipes.bus), list(pipes.kv_bus), pipes.wakeups),
        instance.credentials.prefix_seed,
        instance.identity,
        list(kept),
        highest,
        names,
        workers,
        [seat for seat, state in enumerate(states) if state == Leaving.LEAVES],
        slot,
    )


def execute(handover: Handover) -> NoReturn:
    """Replaces this process's program by the installed one, with the same command line. Raises OSError if the system refuses."""
    blob = msgspec.msgpack.encode(handover)
    file = os.memfd_create("epp handover", 0)
    os.write(file, blob)
    for descriptor in handover.descriptors():
        with contextlib.suppress(OSError):  # a trial has closed those that it does not need
            os.set_inheritable(descriptor, True)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, VARIABLE: str(file)})
    finally:
        os.close(file)
        for descriptor in handover.descriptors():
            with contextlib.suppress(OSError):
                os.set_inheritable(descriptor, False)


def received(environ: MutableMapping[str, str]) -> Handover | None:
    """Returns what another program has passed to this one; None if there is nothing. Raises StartError if its `form` is not FORM."""
    number = environ.pop(VARIABLE, "")
    if not number:
        return None
    file = int(number)
    try:
        handover = msgspec.msgpack.decode(os.pread(file, BYTES_MAX, 0), type=Handover)
    except msgspec.MsgspecError as strange:
        raise StartError(
            f"this version cannot take over from the one that runs: {strange}; restart the picker"
        ) from strange
    finally:
        os.close(file)
    if handover.form != FORM:
        raise StartError(f"this version cannot take over: form {handover.form}, not {FORM}; restart the picker")
    for descriptor in handover.descriptors():
        with contextlib.suppress(OSError):
            os.set_inheritable(descriptor, False)
    return handover
