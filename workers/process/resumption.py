"""Continues the instance that an earlier program of this process has handed over (`handover`).

    a segment is laid out as before     it is the same memory, for the children of both programs
    in another way                      it is made anew. Parts that last, and that this version can read, are carried over as they
                                        are now (`shm.carry`). Children of the earlier program go on with the old segment

The two programs never write the same segment at the same time, unless both lay it out in the same way: its words have one writer then, as
always. The supervisor writes several segments, so it ends before they are carried over, and a new one follows at once.
"""

import os
import signal
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from shm import observe
from shm.carry import carry
from shm.prefix_index import OWNER_LIVE
from shm.segment import InstanceLock, Segment, check_room
from shm.table import TableReader
from workers.process.credentials import Credentials
from workers.process.errors import StartError
from workers.process.generations import Generations
from workers.process.handover import Ends, Handover
from workers.process.instance import FEWER, Instance, give_secret
from workers.process.layout import Described, Layout
from workers.process.loading import Given, load_given, use_plugins
from workers.process.reports import Reports
from workers.process.resources import Memory, Pipe, Pipes, Words
from workers.process.restart import SUPERVISOR
from workers.process.roll import Roll
from workers.process.sockets import Sockets
from workers.process.sources import Sources

if TYPE_CHECKING:
    from epp.config.effective import EffectiveConfig
    from workers.host.options import Options

STATE, LANES, INDEX = "state", "lanes", "index"
# Segment -> the changes of `Names` that lay it out anew. Names keep their order, so earlier configurations still find theirs
ANEW: Final[Mapping[str, dict[str, int]]] = {STATE: {"width": 0}, LANES: {"lane_end": 0, "own": 0}}

log = structlog.get_logger()


def resumed(
    options: "Options", handover: Handover, adjust: Callable[["Options", "EffectiveConfig"], "Options"]
) -> Instance:
    """Returns the instance that was passed on, with the configuration in force. `adjust`: changes the options as the configuration needs.

    A trial gets private memory instead of segments that are made anew. Raises StartError if this version cannot take over, SegmentError,
    GenerationLost, ConfigErrors, PluginImportError.
    """
    words = Words(handover.words)
    generations = Generations(words, handover.files)
    bundle = generations.current()
    given = Given(bundle.text, bundle.source, bundle.plugins)
    use_plugins(options, given)
    config = load_given(options, given)
    options = adjust(options, config)
    sources, layout = Sources(options, config), fitted(options, config, handover)
    pipes = _pipes(handover.pipes)
    if set(layout.plans) != set(handover.layouts) or layout.workers_max != len(pipes.bus):
        raise StartError("this version has other processes or other seats for workers than the one that runs")
    lock = InstanceLock.inherited(options.run_dir, options.instance, handover.lock)
    give_secret(lock)
    roll = Roll(layout.seats + (sources.kv_events is not None), handover.roll)
    memory = _memory(layout, handover, options.instance, lock, roll)
    if layout.names != handover.names:
        generations = generations.renamed(layout.names)
    return Instance(
        options=options,
        config=config,
        sources=sources,
        layout=layout,
        lock=lock,
        memory=memory,
        sockets=Sockets(*(socket.socket(fileno=number) for number in handover.sockets)),
        pipes=pipes,
        words=words,
        generations=generations,
        number=bundle.number,
        roll=roll,
        reports=Reports(pipes.reports),
        credentials=Credentials.read(options, sources.all, config.source, handover.seed),
        identity=handover.identity,
        parent_pid=os.getpid(),
    )


def fitted(options: "Options", config: "EffectiveConfig", handover: Handover) -> Layout:
    """Returns this version's layout, in which every segment keeps its places if this version can use them. Raises StartError."""

    def laid_out(*anew: str) -> Layout:
        changes = {name: value for segment in anew for name, value in ANEW[segment].items()}
        return Layout(options, config, msgspec.structs.replace(handover.names, **changes))

    def stays(segment: str) -> bool:
        try:
            return _same(segment, laid_out(*(other for other in ANEW if other != segment)), handover)
        except StartError:  # no room for what this version has in addition
            return False

    return laid_out(*(segment for segment in ANEW if not stays(segment)))


def renewed(layout: Layout, handover: Handover) -> list[str]:
    """Returns the segments that are made anew, because this version lays them out in another way."""
    return [segment for segment in layout.plans if not _same(segment, layout, handover)]


def _same(segment: str, layout: Layout, handover: Handover) -> bool:
    described = handover.layouts.get(segment)
    return described is not None and described[0] == layout.plans[segment].layout_hash


def _memory(layout: Layout, handover: Handover, instance: str, lock: InstanceLock, roll: Roll) -> Memory:
    anew = renewed(layout, handover)
    old = {segment: Segment.attach(name, None, writable=True) for segment, name in handover.segments.items()}
    kept = {segment: old[segment] for segment in layout.plans if segment not in anew}
    if not anew:
        return Memory.within(layout, kept)
    check_room({segment: layout.needs()[segment] for segment in anew}, FEWER)
    if handover.slot >= 0:  # a trial
        memory = Memory.within(layout, kept)
        _fill(memory, layout, handover.layouts, old, anew)
        return memory
    _end(roll.pid(SUPERVISOR))
    memory = Memory.create(layout, instance, lock, kept)
    carried = _fill(memory, layout, handover.layouts, old, anew)
    lock.forget([old[segment].name for segment in anew])
    for segment in anew:
        old[segment].unlink()
    log.info("segments of shared memory are made anew", segments=anew, carried_over=carried)
    return memory


def _fill(
    memory: Memory, layout: Layout, layouts: Mapping[str, Described], old: Mapping[str, Segment], anew: list[str]
) -> list[str]:
    """Carries over the lasting parts of the segments `anew`, as far as this version can read them. Returns their names."""
    found = {
        name: part for segment in anew for name, part in observe.readable(layouts[segment][1], old[segment]).items()
    }
    lasting = layout.lasting
    carried = [
        name
        for name, part in found.items()
        if name in lasting and part.schema and carry(part.schema, part.region, lasting[name], memory.part(name))
    ]
    if INDEX in anew:  # the owners have no entries any more, and get new ones
        rows = TableReader(layout.table, memory.table).copy()
        states = memory.index.bytes[layout.index.owners_at :]
        for owner in rows.owner[rows.state != 0].tolist():
            states[owner] = OWNER_LIVE
    return carried


def _end(pid: int) -> None:
    """Kills a child and waits until it has ended. The parent reaps it later."""
    if pid:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _pipes(ends: Ends) -> Pipes:
    return Pipes(
        0,
        inherited=(
            [Pipe(*pipe) for pipe in (ends.life, ends.family, ends.reports)],
            [Pipe(*pipe) for pipe in ends.bus],
            [Pipe(*pipe) for pipe in ends.kv_bus],
            ends.wakeups,
        ),
    )
