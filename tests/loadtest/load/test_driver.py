"""The driver's loops against scripted connections, on an event loop with a simulated clock."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import pytest

from loadtest.load import driver
from loadtest.load.driver import CASES, LoadGenerator, Tally, chosen, parser, quantiles, report
from loadtest.load.exchange import DESTINATION, Messages, Shape
from loadtest.load.h2_client import Caller, ClientConnection
from loadtest.load.proto import ext_proc_pb2 as pb


class SimulatedClockLoop(asyncio.SelectorEventLoop):
    """Time passes only during sleeps: when nothing is ready, the clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        scheduled = cast("list[asyncio.TimerHandle]", self._scheduled)  # type: ignore[attr-defined]
        if not self._ready and scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, min(handle.when() for handle in scheduled))
        super()._run_once()  # type: ignore[misc]


class Connection:
    """Answers each stream after `delay` seconds. With `stalled` it answers nothing before `release`."""

    def __init__(self, loop: SimulatedClockLoop, delay: float = 0.0, *, stalled: bool = False, status: str = "0") -> None:
        self._loop = loop
        self._delay = delay
        self._stalled = stalled
        self._status = status
        self._held: list[Stream] = []
        self.opened_at: list[float] = []
        self.open_now = self.open_most = 0

    def open(self, caller: Caller) -> "asyncio.Future[Stream]":
        self.opened_at.append(self._loop.now)
        self.open_now += 1
        self.open_most = max(self.open_most, self.open_now)
        stream = Stream(self, caller)
        if self._stalled:
            self._held.append(stream)
        else:
            self._loop.call_later(self._delay, stream.answer, self._status)
        future: asyncio.Future[Stream] = self._loop.create_future()
        future.set_result(stream)
        return future

    def release(self) -> None:
        self._stalled = False
        for stream in self._held:
            stream.answer(self._status)


class Stream:
    """Returns every message, like a picker."""

    def __init__(self, connection: Connection, caller: Caller) -> None:
        self._connection = connection
        self._caller = caller
        self._body = b""

    def send(self, message: bytes) -> None:
        self._body += pb.ProcessingRequest.FromString(message).request_body.body

    def half_close(self) -> None:
        """`answer` sends the end."""

    def answer(self, status: str) -> None:
        self._connection.open_now -= 1
        if status == "0":
            for message in self._answers():
                self._caller.message(message.SerializeToString())
        self._caller.ended(status, "broken" if status != "0" else "")

    def _answers(self) -> Iterator[pb.ProcessingResponse]:
        headers = pb.ProcessingResponse()
        headers.request_headers.response.header_mutation.set_headers.add().header.key = DESTINATION.decode()
        yield headers
        for kind, body in (("request_body", self._body), ("response_body", b"")):
            answer = pb.ProcessingResponse()
            streamed = getattr(answer, kind).response.body_mutation.streamed_response
            streamed.body, streamed.end_of_stream = body, True
            yield answer


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedClockLoop]:
    clocked = SimulatedClockLoop()
    monkeypatch.setattr(driver.time, "monotonic", lambda: clocked.now)
    yield clocked
    clocked.close()


def load(*connections: Connection) -> LoadGenerator:
    return LoadGenerator(cast("list[ClientConnection]", connections), Messages(Shape(), "t"), first=0)


def paced(loop: SimulatedClockLoop, connection: Connection, rate: float, seconds: float) -> Tally:
    async def run() -> Tally:
        generator = load(connection)
        await generator.paced(rate, loop.now + seconds)
        return generator.tally

    return loop.run_until_complete(run())


def test_an_open_loop_begins_requests_on_schedule_even_if_the_picker_is_slow(loop: SimulatedClockLoop) -> None:
    connection = Connection(loop, delay=5.0)
    tally = paced(loop, connection, 10, 2.0)
    assert [round(at - 1000, 3) for at in connection.opened_at] == [n / 10 for n in range(20)]
    assert tally.endings == Counter(ok=20)
    assert connection.open_most == 20


def test_an_open_loop_measures_latency_from_the_scheduled_time_even_if_the_driver_stalls(loop: SimulatedClockLoop) -> None:
    connection = Connection(loop)

    async def run() -> Tally:
        generator = load(connection)
        loop.call_later(0.45, lambda: setattr(loop, "now", loop.now + 1.0))  # nothing runs for a second
        await generator.paced(10, loop.now + 2.0)
        return generator.tally

    tally = loop.run_until_complete(run())
    assert tally.endings == Counter(ok=20)
    slow = sorted((round(seconds, 2) for seconds in tally.full), reverse=True)
    assert slow[:3] == [0.95, 0.85, 0.75]
    assert slow[-5:] == [0.0] * 5


def test_a_closed_loop_keeps_the_requested_number_of_streams_open_until_its_end(loop: SimulatedClockLoop) -> None:
    first, second = Connection(loop, delay=0.1), Connection(loop, delay=0.1)

    async def run() -> Tally:
        generator = load(first, second)
        await generator.closed(4, loop.now + 1.0)
        return generator.tally

    tally = loop.run_until_complete(run())
    assert (first.open_most, second.open_most) == (2, 2)
    assert 36 <= tally.endings["ok"] <= 44
    assert {round(seconds, 6) for seconds in tally.full} == {0.1}


def test_an_open_loop_limits_its_streams_while_the_picker_stands_still(loop: SimulatedClockLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "OPEN_LOOP_MAX", 5)
    connection = Connection(loop, stalled=True)
    loop.call_later(3.0, connection.release)
    tally = paced(loop, connection, 10, 2.0)
    assert (tally.endings["ok"], tally.late, connection.open_most) == (5, 15, 5)


def test_streams_that_never_end_are_counted_and_do_not_block_the_driver(loop: SimulatedClockLoop) -> None:
    tally = paced(loop, Connection(loop, stalled=True), 10, 0.3)
    assert tally.endings == Counter(failed=3)
    assert "3 streams did not end" in tally.errors[0]


def test_failed_streams_are_counted_and_shown_and_add_no_latency(loop: SimulatedClockLoop) -> None:
    tally = paced(loop, Connection(loop, status="13"), 10, 1.0)
    assert tally.endings == Counter(failed=10)
    assert (tally.full, len(tally.errors)) == ([], driver.ERRORS_SHOWN)
    assert "gRPC status 13" in tally.errors[0]


# Figures.


def options(*arguments: str) -> Namespace:
    return parser().parse_args(["--target", "127.0.0.1:1", *arguments])


def test_quantiles_are_milliseconds_of_the_ordered_values() -> None:
    assert quantiles([]) == {}
    assert quantiles([n / 1000 for n in range(1, 101)]) == {"p50": 51.0, "p90": 91.0, "p99": 100.0, "max": 100.0}


def test_streams_and_connections_are_divided_among_the_processes() -> None:
    case = chosen(options("--case", "short-c64", "--processes", "2"))
    assert (case.concurrency, case.connections) == (32, 2)
    assert chosen(options("--case", "short", "--processes", "8")).connections == 1


def test_options_override_single_properties_of_a_case() -> None:
    shape = chosen(options("--case", "chat-8k", "--prompt-kb", "2", "--chunks", "10", "--pace-ms", "20")).shape
    assert (shape.prompt_bytes, shape.shared_bytes) == (2_000, 2_000)
    assert (shape.chunks, shape.streamed, shape.pace_s) == (10, True, 0.02)
    assert chosen(options("--case", "chat-8k")) == CASES["chat-8k"]


def test_cpu_per_request_counts_successful_requests_only_and_is_zero_without_any() -> None:
    tally = Tally(endings=Counter(ok=100, failed=5))
    result = report(options("--group", "999999999"), tally, 10.0, {"worker": 0.02, "supervisor": 0.01})
    assert (result["cpu_us_per_request"], result["requests_per_s"], result["cores"]) == (300.0, 10.0, 0.003)
    assert result["cores_by_process"] == {"supervisor": 0.001, "worker": 0.002}
    assert report(options("--group", "999999999"), Tally(), 10.0, {"worker": 1.0})["cpu_us_per_request"] == 0.0


def test_tallies_of_processes_add_up() -> None:
    tally = Tally(Counter(ok=1), ["a"], [0.1], [0.2], late=1)
    tally.add(Tally(Counter(ok=2, failed=1), ["b", "c", "d"], [0.3], [0.4], late=2))
    assert tally == Tally(Counter(ok=3, failed=1), ["a", "b", "c"], [0.1, 0.3], [0.2, 0.4], late=3)


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command: list[Any] = [sys.executable, "-m", "loadtest.load.driver", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_without_a_listener_the_driver_fails_with_one_line() -> None:
    done = run("--target", "127.0.0.1:1", "--seconds", "0.1")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["no picker answers at 127.0.0.1:1: connection refused"]


def test_a_target_without_a_port_is_wrong_usage() -> None:
    done = run("--target", "localhost")
    assert done.returncode == 2
    assert "host:port" in done.stderr


@pytest.mark.parametrize(
    ("option", "text"), [("--rate", "-5"), ("--processes", "0"), ("--concurrency", "-1"), ("--seconds", "nan"), ("--chunks", "1.5")]
)
def test_an_invalid_amount_is_wrong_usage(capsys: pytest.CaptureFixture[str], option: str, text: str) -> None:
    with pytest.raises(SystemExit) as stop:
        parser().parse_args(["--target", "127.0.0.1:1", option, text])
    assert stop.value.code == 2
    assert f"{option}: '{text}' is not a" in capsys.readouterr().err


def test_a_target_with_another_protocol_is_reported_in_a_line_with_what_to_try() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def hang_up() -> None:
            for _ in range(2):  # the driver first checks that something listens
                server.accept()[0].close()

        answering = threading.Thread(target=hang_up)
        answering.start()
        done = run("--target", f"127.0.0.1:{port}", "--seconds", "0.1")
        answering.join()
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"127.0.0.1:{port} does not answer like a picker" in done.stderr
    assert "--tls" in done.stderr


def test_a_report_is_json_on_stdout() -> None:
    result = report(options(), Tally(Counter(ok=2), [], [0.1, 0.2], [0.2, 0.3]), 1.0, {})
    assert json.loads(json.dumps(result))["pick_ms"]["max"] == 200.0
