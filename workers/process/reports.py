"""Passes reports from children to the parent: one packet per report, over a pipe that all children share.

The pipe has room for a few packets. A child that finds it full keeps the report, and sends it again at its next heartbeat: a worker whose
first report is lost would be ended as one that did not start.
"""

import contextlib
import os

import msgspec

from workers.process.resources import Pipe

REPORT_BYTES_MAX = 4096


class Report(msgspec.Struct, array_like=True, frozen=True):
    """One report of a child. If no field except `ordinal` and `pid` is set, the child is ready.

    `text`: why the child cannot start, or why it ends; if `generation` is set, why the child cannot use that configuration. `leaving`:
    whether the child has begun to leave. `generation`: the number of the configuration that the child uses from now on, or cannot use; 0 if
    the report is not about a configuration. `key`: the number of the configuration's pool, or the key of the list of pools. `changed`:
    whether files of the configuration have changed.
    """

    ordinal: int
    pid: int
    text: str = ""
    leaving: bool = False
    generation: int = 0
    changed: bool = False
    key: int = 0


class Reports:
    """Writes and reads reports. The parent calls `received`; children call the other methods."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._unsent: list[Report] = []  # in a child: the reports for which the pipe had no room

    def ready(self, ordinal: int) -> None:
        """In a child: reports that the child serves."""
        self._send(Report(ordinal, os.getpid()))

    def failed(self, ordinal: int, text: str) -> None:
        """In a child: reports why the child cannot start, or why it ends."""
        self._send(Report(ordinal, os.getpid(), text[: REPORT_BYTES_MAX // 8] or "no reason given"))

    def leaving(self, ordinal: int) -> None:
        """In a worker: reports that the worker has begun to leave without a signal from the parent."""
        self._send(Report(ordinal, os.getpid(), leaving=True))

    def adopted(self, ordinal: int, generation: int, key: int = 0) -> None:
        """In a child: wakes the parent, because the child uses this configuration from now on. `key`: the number of its pool."""
        self._written(Report(ordinal, os.getpid(), generation=generation, key=key))  # if there is no room, the parent wakes anyway

    def refused(self, ordinal: int, generation: int, text: str, key: int = 0) -> None:
        """In a child: reports why the child cannot use this configuration. The child keeps its present one. `key`: the number of its
        pool.
        """
        self._send(Report(ordinal, os.getpid(), text[: REPORT_BYTES_MAX // 8] or "no reason given", generation=generation, key=key))

    def changed(self, ordinal: int) -> None:
        """In the supervisor: reports that files of the configuration have changed."""
        self._send(Report(ordinal, os.getpid(), changed=True))

    def received(self) -> list[Report]:
        """In the parent: returns the reports since the last call."""
        reports = []
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._pipe.reader, REPORT_BYTES_MAX):
                with contextlib.suppress(msgspec.DecodeError):  # a child that dies inside a write leaves a torn report
                    reports.append(msgspec.msgpack.decode(data, type=Report))
        return reports

    def send_again(self) -> None:
        """In a child: sends the reports for which the pipe had no room. Called at each heartbeat."""
        while self._unsent and self._written(self._unsent[0]):
            del self._unsent[0]

    def _send(self, report: Report) -> None:
        self._unsent.append(report)
        self.send_again()

    def _written(self, report: Report) -> bool:
        """Writes a report. Returns False if the pipe is full."""
        try:
            os.write(self._pipe.writer, msgspec.msgpack.encode(report))
        except BlockingIOError:
            return False
        except OSError:  # the parent is gone
            pass
        return True
