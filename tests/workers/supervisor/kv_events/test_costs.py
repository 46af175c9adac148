"""What events cost: the process names the endpoints, and ends before it takes too much memory."""

import socket
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from tests.e2e.cluster import eventually
from workers.supervisor.kv_events.costs import BUSY_SHARE, LOOK_S, REPORT_S, Costs, largest_peers


class Sender:
    """A followed endpoint."""

    def __init__(self, name: str) -> None:
        self.endpoint = SimpleNamespace(name=name)
        self.seconds, self.malformed, self.too_long, self.troubles = 0.0, 0, 0, 0


def test_above_the_limit_the_process_ends_and_names_the_peers_that_sent_most() -> None:
    used = [0, 0, 900 << 20, 900 << 20]
    costs = Costs(500 << 20, lambda limit: used.pop(0), lambda: None, lambda: {"10.0.0.1:5557": 7})
    assert not costs.too_much(100.0)
    assert not costs.too_much(100.0 + LOOK_S / 2)  # looks now and then
    assert not costs.too_much(101.0)
    with capture_logs() as logs:
        assert costs.too_much(102.0)
    assert logs[0]["bytes_from"] == {"10.0.0.1:5557": 7}


def test_the_peers_that_sent_most_are_found_though_their_bytes_were_not_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        senders = [socket.create_connection(address) for _ in range(2)]
        taken = [listening.accept()[0] for _ in senders]
        for sender, size in zip(senders, (1000, 60_000), strict=True):
            sender.sendall(bytes(size))
        names = ["{}:{}".format(*sender.getsockname()) for sender in senders]
        assert eventually(lambda: largest_peers().get(names[1]) == 60_000)
        assert largest_peers()[names[0]] == 1000
        assert next(iter(largest_peers())) == names[1]
        for each in (*senders, *taken):
            each.close()


def test_memory_that_can_be_given_back_is_no_reason_to_end() -> None:
    used, given = [900, 0], []
    assert not Costs(500, lambda limit: used.pop(0), lambda: given.append(1)).too_much(100.0)
    assert given == [1]


@pytest.mark.parametrize("culprit", ["seconds", "malformed", "too_long", "troubles"])
def test_an_endpoint_that_costs_too_much_is_named_once_per_interval(culprit: str) -> None:
    cpu = [0.0]
    costs, good, bad = Costs(0, lambda limit: 0, cpu=lambda: cpu[0]), Sender("good"), Sender("bad")
    costs.report([good, bad], 1000.0)
    cpu[0] += REPORT_S * 0.95
    good.seconds += BUSY_SHARE * REPORT_S / 2
    setattr(bad, culprit, REPORT_S * 0.9 if culprit == "seconds" else 7)
    with capture_logs() as logs:
        costs.report([good, bad], 1000.0 + REPORT_S)
        costs.report([good, bad], 1000.0 + REPORT_S + 1)
        costs.report([good, bad], 1000.0 + 2 * REPORT_S)
    assert [line["endpoint"] for line in logs] == ["bad"]


def test_an_endpoint_is_not_named_for_time_in_which_the_process_was_frozen_or_waited_for_a_core() -> None:
    cpu = [0.0]
    costs, sender = Costs(0, lambda limit: 0, cpu=lambda: cpu[0]), Sender("a")
    costs.report([sender], 1000.0)
    cpu[0] += BUSY_SHARE * REPORT_S / 2
    sender.seconds += REPORT_S * 0.95
    with capture_logs() as logs:
        costs.report([sender], 1000.0 + REPORT_S)
    assert logs == []
