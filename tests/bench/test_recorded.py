"""Recordings of the benchmarks: what a virtual picker did is what a replay reads."""

from pathlib import Path

import numpy as np

from loadtest.replay.reading import read
from tests.bench.replay_hour import SERVERS, record
from tests.bench.routing_servers import KINDS
from tests.bench.routing_traffic import WORKLOADS
from tests.bench.tune import record as record_kind


def _fail(problem: object) -> None:
    raise AssertionError(problem)


def test_the_recording_of_an_hour_has_all_requests_with_their_outcomes(tmp_path: Path) -> None:
    count = record(tmp_path, 2.0, seed=1)
    found = read(str(tmp_path), _fail, lambda _: None)
    assert len(found.asked) == count and len(found.endpoints) == SERVERS
    assert all(asked.answered and asked.output and asked.cached is not None for asked in found.asked)
    assert all(sight.cache_tokens for sight in found.sights)


def test_a_recorded_fleet_has_its_deaths_and_joins(tmp_path: Path) -> None:
    kind = next(kind for kind in KINDS if kind.name == "shared")
    for name in ("a server dies", "a server joins"):
        workload = next(workload for workload in WORKLOADS if workload.name == name)
        folder = tmp_path / name
        record_kind(kind, workload, folder, 8.0)
        found = read(str(folder), _fail, lambda _: None)
        (server, share) = workload.dies or workload.joins or (0, 0.0)
        changed = next(each for each in found.endpoints if each.member.slot == server)
        if workload.dies:
            assert changed.down and abs(changed.down[0][0] - 8.0 * share) < 0.5
        else:
            assert abs(changed.joined_at - 8.0 * share) < 0.5
        at = np.array([asked.at for asked in found.asked])
        assert (np.diff(at) >= 0).all()
