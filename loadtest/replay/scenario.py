"""A recording with its fitted servers, changes to it (what if), and its replays."""

import gc
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from loadtest.replay.configurations import Configuration
from loadtest.replay.figures import Figures, figures, measured, median
from loadtest.replay.fit import fitted
from loadtest.replay.imported import NOTHING_ASSUMED, Assumed, imported
from loadtest.replay.progress import Progress
from loadtest.replay.reading import SHOWN_EVERY, Lifetime, Recording, read
from loadtest.replay.run import Ints, Replay, Run, World, world
from loadtest.replay.servers import Speed

FEW_REQUESTS: Final = 10_000  # with so few requests, chance moves a p95 by several percent
RUNS: Final = 5
GC_YOUNGEST: Final = 100_000  # high, because cycles are rare in a replay, and the many objects of a recording stay


class WhatIf(NamedTuple):
    """Says what is different from the recording; None and 1 mean no difference."""

    endpoints: int | None = None
    rate: float = 1.0
    slots: int | None = None


class Replayed(msgspec.Struct, frozen=True):
    """The runs of one configuration, each with other random numbers, and the median of each figure over the runs."""

    name: str
    runs: Sequence[Run]
    figures: Figures

    @property
    def run(self) -> Run:
        """Returns the first run."""
        return self.runs[0]


class Scenario(msgspec.Struct, frozen=True):
    """What is replayed. `measured`: the recorded traffic as a run; None if the trace has no times, so that the servers are assumed."""

    recording: Recording
    world: World
    measured: Run | None

    @property
    def measured_figures(self) -> Figures | None:
        measured = self.measured
        return None if measured is None else figures(measured, measured.target, len(self.recording.endpoints))

    def changed(self, what_if: WhatIf) -> "Scenario":
        """Returns this scenario with the changes; the scenario itself if there are no changes."""
        if self.measured is None:
            what_if = what_if._replace(endpoints=None)  # there are as many as wanted already
        if what_if == WhatIf():
            return self
        return msgspec.structs.replace(self, world=_changed(self.world, what_if))

    def replay(self, config: Configuration, progress: Progress, base: Ints | None = None) -> Replayed:
        """Replays a configuration, several times if there are few requests. `base`: for each request, the endpoint to compare with; None
        means the endpoint of the replay itself. Raises OfflineError.
        """
        total = len(self.world.requests)
        times = RUNS if total <= FEW_REQUESTS else 1

        def run(seed: int) -> Run:
            def show(arrived: int) -> None:
                progress.show(f"replaying {config.name}: {seed * total + arrived:,} of {times * total:,} requests")

            return Replay(config.load(), msgspec.structs.replace(self.world, seed=seed), show).run()

        runs = [run(seed) for seed in range(times)]
        size = len(self.world.endpoints)
        each = [figures(run, run.target if base is None else base, size) for run in runs]
        return Replayed(config.name, runs, median(each))


class Outcome(NamedTuple):
    """All replays. `fit`: the replay of the recorded configuration without changes; `base`: the same with the changes in `changed`."""

    scenario: Scenario
    changed: Scenario
    fit: Replayed
    base: Replayed
    others: Mapping[str, Replayed]

    @property
    def fit_figures(self) -> Figures | None:
        """Returns the figures of the replay, for exactly those requests whose answers `measured` has."""
        measured = self.scenario.measured
        if measured is None:
            return None
        whole, endpoints = np.flatnonzero(measured.target >= 0), len(self.scenario.recording.endpoints)
        return median([figures(run, measured.target, endpoints, whole) for run in self.fit.runs])


class Clients(NamedTuple):
    """Says how clients behave. `open`: whether no client waits for an answer. `number`: the number of clients in a closed loop; 0: see
    `loadtest.replay.clients`.
    """

    open: bool = False
    number: int = 0


def read_scenario(
    path: str, progress: Progress, clients: Clients, endpoints: int | None = None, assumed: Assumed = NOTHING_ASSUMED, pool: str = ""
) -> Scenario:
    """Reads a recording and fits its servers, or a trace of a public format. `pool`: which pool to read, if there are several. Raises
    Unreadable, TooLittle.

    From here on, this process runs the garbage collector less often.
    """
    gc.set_threshold(GC_YOUNGEST)
    trace = imported(path, endpoints, assumed)
    if trace is None:
        recording, speeds = _recorded(path, progress, pool)
    else:
        recording, speeds = trace
    replayed = world(recording.asked, recording.endpoints, speeds, open=clients.open, clients=clients.number)
    return Scenario(recording, replayed, None if trace is not None else measured(recording))


def _recorded(path: str, progress: Progress, pool: str) -> tuple[Recording, list[Speed]]:
    shown = 0

    def reading(count: int) -> None:
        nonlocal shown
        if count - shown >= SHOWN_EVERY:
            shown = count
            progress.show(f"reading {path}: {count:,} requests")

    recording = read(path, progress.caution, reading, pool)
    if recording.lost:
        progress.caution(f"the recording lost {recording.lost} records; requests without an end are treated as unanswered")
    if not any(asked.hashes for asked in recording.asked):
        progress.caution(
            "the recording has no block hashes, because its configuration has no prefix producer: "
            "each request has as many cached tokens as recorded, under any configuration"
        )
    speeds = fitted(recording, lambda line: progress.show(f"fitting servers: {line}"))
    return recording, speeds


def _changed(world: World, what_if: WhatIf) -> World:
    """Returns the world with another number of endpoints, of slots or of requests. Further endpoints copy the recorded ones in turn."""
    endpoints, speeds = list(world.endpoints), list(world.speeds)
    size = len(endpoints) if what_if.endpoints is None else what_if.endpoints
    more = [_copy(endpoints[at % len(endpoints)], at) for at in range(len(endpoints), size)]
    speeds = [speeds[at % len(speeds)] for at in range(size)]
    if what_if.slots is not None:
        speeds = [msgspec.structs.replace(speed, slots=what_if.slots) for speed in speeds]
    return msgspec.structs.replace(world, endpoints=[*endpoints, *more][:size], speeds=speeds, rate=what_if.rate)


def _copy(lifetime: Lifetime, number: int) -> Lifetime:
    member = lifetime.member
    copied = msgspec.structs.replace(member, name=f"{member.name}-{number}", address=f"192.0.2.{number % 256}:{1024 + number}")
    return msgspec.structs.replace(lifetime, member=copied)
