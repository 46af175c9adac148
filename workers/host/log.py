"""Logging that never waits for its reader. The picker logs few lines, and none per request.

The log has JSON lines on stderr, or coloured text if stderr is a terminal. All processes write to the same file, with one write per
line. A line that cannot be written at once (full pipe, slow reader) is dropped and counted, and the next line that gets through reports
the number. Each event gets at most `LINES_PER_S` lines, so a storm of one fault leaves room for others.

A JSON line is always whole. If it would be too long, its longest values lose their middle, and the field `cut` says so.

Logs must not contain prompts. So an exception that a request caused is logged with `error_text` and `stack`.
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
sys.modules.update(UNUSED)  # type: ignore[arg-type]  # structlog would import them if installed: 5 MiB that we do not use
import structlog  # noqa: E402

from workers.host.printable import printable  # noqa: E402

for _name in UNUSED:
    del sys.modules[_name]

LINE_BYTES_MAX = 4096  # the largest write to a pipe that is atomic
LINES_PER_S = 50
REQUEST = "request"  # the event of --access-log, whose number of lines the operator chooses
EVENTS_MAX = 256
REPORT_EVERY_S = 10.0  # see `Rarely`
ERROR_CHARS_MAX = 256
CITING = (KeyError, ValueError)  # exceptions with a text that repeats their input
VALUE_CHARS = (2048, 1024, 512, 256, 128, 64)  # limits for the values of a line that is too long, tried in this order
EXCEPTION = "exception"  # the field of a stack
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}

FIRST = ("timestamp", "level", "process", "pid", "event")  # the fields at the start of each line, in this order

Event = MutableMapping[str, Any]
_own = {"process": "parent"}


class LineWriter:
    """Writes whole lines to a descriptor and never waits."""

    def __init__(self, descriptor: int) -> None:
        self.dropped = 0
        self._write, self.close = _non_blocking(descriptor)

    def msg(self, line: str) -> None:
        """Writes one line. Drops the line if it cannot be written at once."""
        data = line.encode(errors="replace")
        if len(data) >= LINE_BYTES_MAX:
            data = data[: LINE_BYTES_MAX - 4] + b"..."
        lost = b'{"event":"log lines dropped","lines":%d}\n' % self.dropped if self.dropped else b""
        if lost and self._written(lost):
            self.dropped = 0
        if not self._written(data + b"\n"):
            self.dropped += 1

    log = debug = info = warning = warn = error = critical = exception = fatal = failure = msg

    def _written(self, data: bytes) -> bool:
        try:
            return self._write(data) > 0
        except OSError:  # full, or without a reader
            return False


class Limit:
    """Allows at most `LINES_PER_S` lines per event and second, except of REQUEST.

    The event's first line in a later second says in its field `suppressed` how many lines were dropped.
    """

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
        if name == REQUEST:
            return event
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
    """Encodes the event as JSON, shorter than LINE_BYTES_MAX bytes."""
    line = json.dumps(event, **options)
    if len(line) < LINE_BYTES_MAX:  # characters are bytes here: JSON escapes all that is not ASCII
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
    """Returns the text of an exception, cut to ERROR_CHARS_MAX characters. Returns "" for a type whose text often repeats a prompt."""
    return "" if isinstance(problem, CITING) else str(problem)[:ERROR_CHARS_MAX]


def error_text(problem: BaseException) -> str:
    """Returns the type of an exception and its text (see `words`)."""
    text, name = words(problem), type(problem).__name__
    return f"{name}: {text}" if text else name


def stack(problem: BaseException | None) -> str:
    """Returns the stack of an exception, after the stacks of its causes."""
    stacks: list[str] = []
    while problem is not None:
        stacks.append("".join(traceback.format_tb(problem.__traceback__)) + error_text(problem))
        problem = problem.__cause__ or (None if problem.__suppress_context__ else problem.__context__)
    return "\n\n".join(reversed(stacks))


class Rarely:
    """Reports a frequent problem at most every REPORT_EVERY_S: how often it happened since the last report, and its last text."""

    def __init__(self, what: str, report: Callable[..., None]) -> None:
        """`report` is called as `report(what, times=..., last=...)`, like a method of a logger."""
        self._what = what
        self._report = report
        self._times = 0
        self._next = 0.0

    def tell(self, now: float, last: str) -> None:
        self._times += 1
        if now >= self._next:
            self._report(self._what, times=self._times, last=last)
            self._times, self._next = 0, now + REPORT_EVERY_S


def fill_standard_descriptors() -> None:
    """Opens /dev/null for each standard descriptor (0 to 2) that is closed.

    Otherwise a socket could get the number 2, and stack traces would be sent to its peer.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(opened)
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115 - stays open as long as the process
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115


def configure(level: str = "info", *, console: bool | None = None, descriptor: int = 2) -> None:
    """Configures logging for this process and its future children.

    `console`: whether to write text instead of JSON. None: text if stderr is a terminal. `descriptor`: where lines are written.
    """
    writer = LineWriter(descriptor)
    on_terminal = sys.stderr.isatty() if console is None else console
    processors: list[Any] = [
        Limit(),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _process,
        _ordered,
        structlog.processors.format_exc_info,
    ]
    if on_terminal:
        processors += [_printable_values, structlog.dev.ConsoleRenderer()]
    else:
        processors.append(structlog.processors.JSONRenderer(serializer=json_line))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=lambda *_names: writer,
        cache_logger_on_first_use=True,
    )


def name_process(name: str) -> None:
    """Sets the name of this process in its later log lines: supervisor, worker 0, … Each child calls it after the fork."""
    _own["process"] = name


def _process(_logger: Any, _method: str, event: Event) -> Event:
    event.setdefault("process", _own["process"])
    event.setdefault("pid", os.getpid())
    return event


def _ordered(_logger: Any, _method: str, event: Event) -> Event:
    """Puts the fields of FIRST before the others, which keep their order."""
    return {name: event[name] for name in FIRST if name in event} | {k: v for k, v in event.items() if k not in FIRST}


def _printable_values(_logger: Any, _method: str, event: Event) -> Event:
    """Escapes what a terminal would obey or hide. JSON needs no such step, because it escapes all that is not ASCII.

    A stack trace keeps its line breaks. Its lines are indented, so that no line of an exception's text looks like a line of the log.
    """
    for key, value in event.items():
        if key == EXCEPTION:
            event[key] = "\n".join(f"  {printable(line)}" for line in str(value).split("\n"))
        elif isinstance(value, str):
            event[key] = printable(value)
    return event


def _non_blocking(descriptor: int) -> tuple[Callable[[bytes], int], Callable[[], None]]:
    """Returns a function that writes to `descriptor` without waiting, and a function that closes the descriptor opened for this.

    The open file keeps its flags, because other processes may share it.
    """
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):
        duplicate = socket.socket(fileno=os.dup(descriptor))
        return lambda data: duplicate.send(data, socket.MSG_DONTWAIT), duplicate.close
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        with contextlib.suppress(OSError):  # another user's pipe cannot be opened again
            reopened = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | os.O_APPEND)
            return lambda data: os.write(reopened, data), lambda: os.close(reopened)
        return lambda data: os.write(descriptor, data) if _has_room(descriptor) else 0, lambda: None
    return lambda data: os.write(descriptor, data), lambda: None


def _has_room(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))
