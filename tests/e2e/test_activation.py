"""A picker with sockets of systemd restarts under load (`tests.e2e.activation`): no connection is refused, no request fails."""

import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import pytest

from loadtest.demo import envoy_config
from loadtest.demo.children import python
from tests.e2e.cluster import CHAT, COMPLETIONS, LOOPBACK, Cluster, Picker, ask, chat, completion, events, eventually

UNDER = python("tests.e2e.activation")
TOKENS = 150  # of a stream that still runs when the picker begins to drain
PAUSE_S = 0.03  # between two calls, because a flood of connections is another matter


class Repeated:
    """Calls a function again and again in threads while its block runs, and keeps what it returns."""

    def __init__(self, once: Callable[[], object], *, threads: int = 1) -> None:
        self.results: list[object] = []
        self._once = once
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._over.wait(PAUSE_S):
            self.results.append(self._once())


def connected(port: int) -> str:
    """Connects to a port. Returns why that fails, or ""."""
    try:
        socket.create_connection((LOOPBACK, port)).close()
    except OSError as refused:
        return str(refused)
    return ""


def served(port: int) -> str:
    """Sends a request. Returns the answer if it is an error, or ""."""
    answer = ask(port, COMPLETIONS, completion("hello", max_tokens=2))
    return "" if answer.status == 200 else f"{answer.status} {answer.body!r}"


def restart(cluster: Cluster, picker: Picker) -> None:
    """Restarts the picker, and waits until its successor serves with all workers."""
    starts = picker.child.text().count("the picker serves")
    picker.child.signal(signal.SIGHUP)
    cluster.wait(picker.child, lambda: picker.child.text().count("the picker serves") > starts and picker.complete(2))


@pytest.mark.parametrize(("secure", "restarts"), [(False, 2), (True, 1)], ids=["plaintext", "tls"])
def test_a_restart_under_load_refuses_no_connection_and_fails_no_request(cluster: Cluster, secure: bool, restarts: int) -> None:
    fleet = cluster.fleet(2, "--prefill-us-per-token", "1", "--decode-ms", "10")
    flags = ("--secure-serving=true",) if secure else ()
    picker = cluster.picker(fleet.file, *flags, workers=2, under=UNDER)
    port = cluster.envoy(picker, tls=envoy_config.PickerTls() if secure else None)
    load = Repeated(lambda: served(port), threads=4)
    prober = Repeated(lambda: connected(picker.grpc))
    with load, prober, ThreadPoolExecutor(1) as streams:
        for _ in range(restarts):
            long = streams.submit(ask, port, CHAT, chat("a long one", max_tokens=TOKENS, stream=True))
            sent = len(load.results)
            assert eventually(lambda sent=sent: len(load.results) > sent + 4)  # type: ignore[misc]
            restart(cluster, picker)
            answer = long.result()
            assert answer.status == 200
            assert len(events(answer.body)) >= TOKENS
    assert Counter(load.results) == {"": len(load.results)}
    assert Counter(prober.results) == {"": len(prober.results)}
    assert "open streams are cut" not in picker.child.text()
