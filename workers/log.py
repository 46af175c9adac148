"""Logging: few lines, never per request, and never waiting for whoever reads them.

JSON lines on stderr, or coloured text when stderr is a terminal. All processes write to the same place, one write per line. A
line that cannot be taken at once (a full pipe, a reader that sleeps) is dropped and counted; the next one that gets through
says how many were lost. One kind of event gets at most `LINES_PER_S`, so that a storm of one fault leaves room for others.

A JSON line is always whole: when it would be too long, its longest values lose their middle, and it says so (`cut`).

Logs outlive requests and are read by others: an exception that a request caused is logged by `told` and `stack`.
"""

import contextlib
import json
import os
import select
import socket
import stat
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, MutableMapping
from typing import Any

UNUSED = {name: None for name in ("rich", "greenlet") if name not in sys.modules}
sys.modules.update(UNUSED)  # type: ignore[arg-type]  # structlog imports them where they are installed: 5 MiB that nothing here uses
import structlog  # noqa: E402

from workers.printable import printable  # noqa: E402

for _name in UNUSED:
    del sys.modules[_name]

LINE_BYTES_MAX = 4096  # a pipe takes as much in one piece, or nothing
LINES_PER_S = 50
EVENTS_MAX = 256
REPORT_EVERY_S = 10.0  # of what is reported rarely
TOLD_CHARS_MAX = 256
CITING = (KeyError, ValueError)  # exceptions whose words are what they choked on
VALUE_CHARS = (2048, 1024, 512, 256, 128, 64)  # how long a value of a line that is too long may be, tried in turn
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}

Event = MutableMapping[str, Any]


class LineWriter:
    """Writes whole lines to a descriptor without ever waiting for it."""

    def __init__(self, descriptor: int) -> None:
        self.dropped = 0
        self._write, self.close = _non_blocking(descriptor)

    def msg(self, line: str) -> None:
        """One line; dropped when it cannot be taken at once."""
        data = line.encode(errors="replace")
        if len(data) >= LINE_BYTES_MAX:
            data = data[: LINE_BYTES_MAX - 4] + b"..."
        lost = b'{"event":"log lines dropped","lines":%d}\n' % self.dropped if self.dropped else b""
        if lost and self._taken(lost):
            self.dropped = 0
        if not self._taken(data + b"\n"):
            self.dropped += 1

    log = debug = info = warning = warn = error = critical = exception = fatal = failure = msg

    def _taken(self, data: bytes) -> bool:
        try:
            return self._write(data) > 0
        except OSError:  # full, or nobody reads any more
            return False


class Limit:
    """At most `LINES_PER_S` lines of one event in a second; the rest is counted in its first line of a later second."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._second = 0
        self._lines: dict[str, int] = {}
        self._lost: Counter[str] = Counter()

    def __call__(self, _logger: Any, _method: str, event: Event) -> Event:
        second = int(self._now())
        if second != self._second or len(self._lines) >= EVENTS_MAX:
            self._second = second
            self._turn()
        name = str(event.get("event"))
        count = self._lines[name] = self._lines.get(name, 0) + 1
        if count > LINES_PER_S:
            raise structlog.DropEvent
        if lost := self._lost.pop(name, 0):
            event["suppressed"] = lost + event.get("suppressed", 0)
        return event

    def _turn(self) -> None:
        for name, count in self._lines.items():
            if count > LINES_PER_S:
                self._lost[name] += count - LINES_PER_S
        self._lines = {}
        while len(self._lost) > EVENTS_MAX:
            del self._lost[next(iter(self._lost))]


def json_line(event: Event, **options: Any) -> str:
    """The event as JSON that fits into a line."""
    line = json.dumps(event, **options)
    if len(line) < LINE_BYTES_MAX:  # bytes too: all that is not ASCII is escaped
        return line
    for longest in VALUE_CHARS:
        cut = {key: _shortened(value, longest, options) for key, value in event.items()}
        line = json.dumps(cut | {"cut": True}, **options)
        if len(line) < LINE_BYTES_MAX:
            return line
    return json.dumps({"event": str(event.get("event"))[: VALUE_CHARS[-1]], "cut": True})


def _shortened(value: Any, longest: int, options: dict[str, Any]) -> Any:
    text = value if isinstance(value, str) else json.dumps(value, **options)
    if len(text) <= longest:
        return value
    half = longest // 2
    return f"{text[:half]} ... {text[-half:]}"


def words(problem: BaseException) -> str:
    """What an exception says of itself, unless it is likely to repeat a prompt."""
    return "" if isinstance(problem, CITING) else str(problem)[:TOLD_CHARS_MAX]


def told(problem: BaseException) -> str:
    """An exception on one line."""
    said, name = words(problem), type(problem).__name__
    return f"{name}: {said}" if said else name


def stack(problem: BaseException | None) -> str:
    """Where an exception came from, behind those that it came from."""
    found: list[str] = []
    while problem is not None:
        found.append("".join(traceback.format_tb(problem.__traceback__)) + told(problem))
        problem = problem.__cause__ or (None if problem.__suppress_context__ else problem.__context__)
    return "\n\n".join(reversed(found))


class Rarely:
    """Reports what may happen often: how often it did, and the last of it."""

    def __init__(self, what: str, report: Callable[[str], None]) -> None:
        self._what = what
        self._report = report
        self._times = 0
        self._next = 0.0

    def tell(self, now: float, last: str) -> None:
        self._times += 1
        if now >= self._next:
            self._report(f"{self._what}: {self._times}; the last: {last}")
            self._times, self._next = 0, now + REPORT_EVERY_S


def fill_standard_descriptors() -> None:
    """Whoever was started with 0, 1 or 2 closed writes to /dev/null there: else a socket gets the number, and stacks go into it."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115 - as long-lived as the process
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115


def configure(level: str = "info", *, console: bool | None = None, descriptor: int = 2) -> None:
    """For this process and those it forks."""
    on_terminal = sys.stderr.isatty() if console is None else console
    renderer: Any
    if on_terminal:
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    else:
        renderer = structlog.processors.JSONRenderer(serializer=json_line)
    processors: list[Any] = [
        Limit(),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _pid,
    ]
    processors.append(_steers_nothing if on_terminal else structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=_Factory(LineWriter(descriptor)),
        cache_logger_on_first_use=True,
    )


class _Factory:
    """Everybody logs to one writer."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def __call__(self, *_names: Any) -> LineWriter:
        return self._writer


def _pid(_logger: Any, _method: str, event: Event) -> Event:
    event.setdefault("pid", os.getpid())
    return event


def _steers_nothing(_logger: Any, _method: str, event: Event) -> Event:
    """JSON escapes what a terminal would obey."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = printable(value, kept="\n\t")
    return event


def _non_blocking(descriptor: int) -> tuple[Callable[[bytes], int], Callable[[], None]]:
    """A way to write that does not wait, and to close it; others who hold the same open file see no change."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):
        held = socket.socket(fileno=os.dup(descriptor))
        return lambda data: held.send(data, socket.MSG_DONTWAIT), held.close
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        with contextlib.suppress(OSError):  # another user's pipe may not be opened anew
            own = os.open(
                f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | os.O_APPEND
            )
            return lambda data: os.write(own, data), lambda: os.close(own)
        return lambda data: os.write(descriptor, data) if _has_room(descriptor) else 0, lambda: None
    return lambda data: os.write(descriptor, data), lambda: None


def _has_room(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))
