"""Loads between two pages: what was read, plus what was sent, minus what has ended."""

import random
from typing import Any

import numpy as np
import pytest

from epp.candidates import Floats
from tests.cases import cases
from workers.worker.extproc.account import STEP_S, Account, Load

NAN = float("nan")


class Servers:
    """Servers with pages that an account carries on, and with requests in flight."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.account = Account(count + 3)
        self.slots: Any = np.arange(count) + 1
        self.generation = np.ones(count, dtype=np.uint64)
        self.page_at = np.zeros(count)
        self.page = Load(*(np.full(count, NAN) for _ in range(3)), np.zeros(count))
        self.inflight = np.zeros(count)
        self.now = 100.0

    def read(self, running: list[float], waiting: list[float], kv: list[float] | None = None) -> None:
        """Reads a page of each server."""
        self.page_at = np.full(self.count, self.now)
        kv = [0.0] * self.count if kv is None else kv
        self.page = Load(np.array(running), np.array(waiting), np.array(kv), self.inflight.copy())

    def carried(self, after_s: float = STEP_S + 0.01) -> Load:
        self.now += after_s
        return self.account.carry(self.slots, self.generation, self.page_at, self.page, self.inflight, self.now)


def shown(values: Floats) -> list[float]:
    return [round(value, 6) for value in values.tolist()]


def test_a_young_page_counts_as_it_is() -> None:
    servers = Servers(1)
    servers.read([2.0], [1.0])
    servers.inflight += 3
    load = servers.carried(STEP_S / 2)
    assert load == servers.page, "candidates add what was sent since"


def test_requests_that_were_sent_since_the_page_run_up_to_the_batch_and_wait_beyond_it() -> None:
    servers = Servers(1)
    servers.inflight[:] = 10
    servers.read([8.0], [2.0])
    servers.inflight[:] = 4
    load = servers.carried()
    assert (shown(load.running), shown(load.waiting), shown(load.counted)) == ([4], [0], [4])
    servers.inflight[:] = 13
    load = servers.carried()
    assert (shown(load.running), shown(load.waiting), shown(load.counted)) == ([8], [5], [13])


def test_requests_that_have_ended_leave_the_queue_first() -> None:
    servers = Servers(1)
    servers.inflight[:] = 12
    servers.read([8.0], [4.0])
    servers.inflight[:] = 9
    load = servers.carried()
    assert (shown(load.running), shown(load.waiting)) == ([8], [1])


def test_before_a_batch_was_seen_what_was_sent_waits() -> None:
    servers = Servers(1)
    servers.read([0.0], [0.0])
    servers.inflight[:] = 5
    load = servers.carried()
    assert (shown(load.running), shown(load.waiting)) == ([0], [5])


def test_a_server_whose_batch_is_not_known_runs_as_many_as_the_others_were_seen_to_run() -> None:
    servers = Servers(2)
    servers.read([6.0, 0.0], [0.0, 0.0])
    servers.inflight[:] = [0, 8]
    load = servers.carried()
    assert (shown(load.running), shown(load.waiting)) == ([6, 6], [0, 2])


def test_a_batch_that_was_full_is_the_limit_until_a_page_shows_more() -> None:
    servers = Servers(2)
    servers.read([4.0, 20.0], [1.0, 0.0])
    servers.inflight[:] = [6, 0]
    load = servers.carried()
    assert (shown(load.running), shown(load.waiting)) == ([4, 20], [7, 0])
    servers.inflight[:] = 0
    servers.read([5.0, 20.0], [0.0, 0.0])
    servers.inflight[:] = [6, 0]
    load = servers.carried()
    assert (shown(load.running), shown(load.waiting)) == ([11, 20], [0, 0])


def test_kv_usage_moves_by_what_a_running_request_holds() -> None:
    servers = Servers(2)
    servers.inflight[:] = [4, 0]
    servers.read([4.0, 0.0], [0.0, 0.0], [0.4, 0.0])
    servers.inflight[:] = [2, 0]
    assert shown(servers.carried().kv) == [0.2, 0.0]
    servers.inflight[:] = [0, 0]
    servers.read([0.0, 0.0], [0.0, 0.0], [0.05, 0.0])
    servers.inflight[:] = [3, 3]
    assert shown(servers.carried().kv) == [0.35, 0.0], "0.1 each, as when it was last seen to run some; never seen: nothing"
    servers.inflight[:] = [40, 0]
    assert max(servers.carried().kv) <= 1.0


def test_what_a_server_does_not_report_stays_unknown() -> None:
    servers = Servers(2)
    servers.read([NAN, 3.0], [1.0, NAN], [NAN, 0.3])
    servers.inflight[:] = 2
    load = servers.carried()
    assert np.isnan(load.running).tolist() == [True, False]
    assert np.isnan(load.waiting).tolist() == [False, True]
    assert np.isnan(load.kv).tolist() == [True, False]
    assert load.waiting[0] == 3.0


def test_a_server_that_was_never_read_has_nothing_to_carry() -> None:
    servers = Servers(1)
    servers.inflight[:] = 4
    load = servers.carried()
    assert np.isnan(load.waiting[0])
    assert load.counted[0] == 0


def test_another_server_in_the_same_slot_begins_anew() -> None:
    servers = Servers(1)
    servers.inflight[:] = 9
    servers.read([8.0], [1.0], [0.8])
    servers.carried()
    servers.generation += np.uint64(1)
    servers.inflight[:] = 0
    servers.read([0.0], [0.0])
    servers.inflight[:] = 2
    load = servers.carried()
    assert (shown(load.running), shown(load.waiting), shown(load.kv)) == ([0], [2], [0.0])


def test_a_carried_load_does_not_change_after_it_was_returned() -> None:
    servers = Servers(1)
    servers.account = Account(1)
    servers.slots = np.arange(1)
    servers.read([1.0], [0.0])
    servers.inflight[:] = 2
    load = servers.carried()
    servers.inflight[:] = 7
    servers.carried()
    assert shown(load.counted) == [2]


@cases("seed", range(10))
def test_without_other_senders_the_account_never_drifts_from_the_server(seed: int) -> None:
    """A server with a batch of 8 gets requests and ends them. Pages come at random, and show what is there."""
    rng = random.Random(seed)
    servers = Servers(1)
    servers.inflight[:] = 20
    servers.read([8.0], [12.0], [0.8])
    servers.carried()
    for _ in range(300):
        servers.inflight[0] = max(0, servers.inflight[0] + rng.randint(-4, 4))
        there = servers.inflight[0]
        if rng.random() < 0.2:
            servers.read([min(there, 8.0)], [max(there - 8.0, 0.0)], [0.1 * min(there, 8.0)])
        load = servers.carried()
        assert load.running[0] + load.waiting[0] == there
        assert load.running[0] == min(there, 8)
        assert load.kv[0] == pytest.approx(0.1 * min(there, 8))
