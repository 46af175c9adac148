"""A recording with its fitted servers, what if it were different, and its replays."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from workers.cli.replay.configurations import Configuration
from workers.cli.replay.figures import Figures, figures, measured
from workers.cli.replay.fit import fitted
from workers.cli.replay.progress import Progress
from workers.cli.replay.reading import SHOWN_EVERY, Lifetime, Recording, read
from workers.cli.replay.run import Ints, Replay, Run, World, world


class WhatIf(NamedTuple):
    """What is different from the recording; None and 1: nothing."""

    endpoints: int | None = None
    rate: float = 1.0
    slots: int | None = None


class Replayed(msgspec.Struct, frozen=True):
    """A run of one configuration and its figures."""

    name: str
    run: Run
    figures: Figures


class Scenario(msgspec.Struct, frozen=True):
    """What is replayed. `measured`: the recorded traffic as a run."""

    recording: Recording
    world: World
    measured: Run

    @property
    def whole(self) -> np.ndarray:
        """The requests whose answers were recorded to their ends, as a mask: only these are compared with what was measured."""
        return np.asarray(self.measured.target >= 0)

    @property
    def measured_figures(self) -> Figures:
        return figures(self.measured, self.measured.target, len(self.recording.endpoints))

    def changed(self, what_if: WhatIf) -> "Scenario":
        """Returns this scenario with the changes; itself if there are none."""
        if what_if == WhatIf():
            return self
        return msgspec.structs.replace(self, world=_changed(self.world, what_if))

    def replay(self, config: Configuration, progress: Progress, base: Ints | None = None) -> Replayed:
        """Replays a configuration. `base`: the endpoint of each request to compare with; None: its own. Raises OfflineError."""
        total = len(self.world.requests)
        show = lambda arrived: progress.show(f"replaying {config.name}: {arrived:,} of {total:,} requests")  # noqa: E731
        run = Replay(config.load(), self.world, show).run()
        return Replayed(config.name, run, figures(run, run.target if base is None else base, len(self.world.endpoints)))


class Outcome(NamedTuple):
    """All replays. `fit`: of the recorded configuration, as recorded; `base`: the same with the changes in `changed`."""

    scenario: Scenario
    changed: Scenario
    fit: Replayed
    base: Replayed
    others: Mapping[str, Replayed]

    @property
    def fit_figures(self) -> Figures:
        """The figures of the replay of exactly the requests that `measured` has answers of."""
        scenario = self.scenario
        return figures(self.fit.run, scenario.measured.target, len(scenario.recording.endpoints), scenario.whole)


def read_scenario(path: str, progress: Progress, *, is_open: bool = False, clients: int = 0) -> Scenario:
    """Reads a recording and fits its servers. Raises Unreadable, TooLittle."""
    shown = 0

    def reading(count: int) -> None:
        nonlocal shown
        if count - shown >= SHOWN_EVERY:
            shown = count
            progress.show(f"reading {path}: {count:,} requests")

    recording = read(path, progress.warn, reading)
    if recording.lost:
        progress.warn(f"the recording lost {recording.lost} records; requests without an end count as unanswered")
    if not any(asked.hashes for asked in recording.asked):
        progress.warn(
            "the recording has no block hashes, because its configuration has no prefix producer: "
            "each request has as many cached tokens as recorded, under any configuration"
        )
    speeds = fitted(recording, lambda line: progress.show(f"fitting servers: {line}"))
    replayed = world(recording.asked, recording.endpoints, speeds, open=is_open, clients=clients)
    return Scenario(recording, replayed, measured(recording))


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
    copied = msgspec.structs.replace(
        member, name=f"{member.name}-{number}", address=f"192.0.2.{number % 256}:{1024 + number}"
    )
    return msgspec.structs.replace(lifetime, member=copied)
