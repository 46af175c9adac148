"""Reads a file of endpoints and follows its changes.

- At start, a single bad entry is enough to refuse the file. The error lists all faults, each with file and line.
- When the file changes later, bad entries are skipped. If the file cannot be read, has no list (as an empty file), or all its entries are
  bad, the last good endpoints stay. A fault is reported once, not again at every reload.
- `endpoints: []` means that there are no endpoints. After a list with entries, an empty list is accepted when it has stayed empty for
  HOLD_S (`EmptyList`).
- The *directory* is watched, so that a file renamed into place and a swapped symlink are noticed. The file is also read every few
  seconds, in case the watch misses a change.
"""

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any, Final

from workers.host.directory import LOOK_EVERY_S, changes
from workers.host.yaml_files import FAULTS_SHOWN_MAX, DiscoveryError, log_fields, read_file
from workers.supervisor.endpoints.discovery import HOLD_S, EmptyList, Entry, Parsed, parse_file

INSTEAD: Final = "deploy/endpoints.yaml is a sample of such a file, and --endpoints host:port,... replaces it"
LONG_BYTES: Final = 1 << 16  # a file of this length takes 0.1 s to parse, and the longest file up to 2 s


class File:
    """A file of endpoints. `load` is for the start and refuses a file with faults. `reload` is for later and skips bad entries."""

    def __init__(
        self,
        path: str,
        report: Callable[..., None],
        *,
        clusters: bool = False,
        on_change: Callable[[], None] = lambda: None,
        expects: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clusters`: see `parse_file`. `reload` calls `on_change` for each changed content.

        `expects`: whether a predecessor knew endpoints. `now`: in monotonic seconds.
        """
        self.path = path
        self._on_change = on_change
        self._clusters = clusters
        self.directory = os.path.dirname(os.path.abspath(path))
        self._report = report
        self._now = now
        self._text: bytes | None = None
        self._has_entries = expects
        self._empty = EmptyList()
        self._reported: frozenset[str] = frozenset()

    def load(self) -> list[Entry]:
        """Returns all entries. Raises DiscoveryError with all faults."""
        try:
            text = read_file(self.path)
        except DiscoveryError as failure:
            raise DiscoveryError([f"{fault}; {INSTEAD}" for fault in failure.faults]) from failure
        parsed = parse_file(text, self.path, clusters=self._clusters)
        if parsed.faults:
            raise DiscoveryError(parsed.faults)
        self._text = text
        self._has_entries = bool(parsed.entries)
        self._report_new(parsed.remarks)
        return parsed.entries

    @property
    def holds(self) -> bool:
        """Whether an empty list is held back, so that the caller must call `reload` again after `wait_s`."""
        return self._empty.until is not None

    def wait_s(self) -> float:
        """Returns the seconds until the file must be read again, even without a notice of a change."""
        until = self._empty.until
        return LOOK_EVERY_S if until is None else min(LOOK_EVERY_S, max(0.0, until - self._now()))

    def reload(self) -> list[Entry] | None:
        """Reads the file again and returns its good entries. Reports faults that it has not reported before.

        Returns None if the file is unchanged, has no readable list, has faults and no good entry, or is empty and this is not accepted yet.
        """
        text = self._changed_text()
        return None if text is None else self._good(self._parsed(text))

    async def reload_beside(self) -> list[Entry] | None:
        """Does the same as `reload`, but parses a long file in a thread. Parsing takes seconds, and would block the event loop."""
        text = self._changed_text()
        if text is None:
            return None
        long = len(text) > LONG_BYTES
        return self._good(await asyncio.to_thread(self._parsed, text) if long else self._parsed(text))

    def _changed_text(self) -> bytes | None:
        """Returns the content of the file. Returns None if it is unchanged and no empty list is held back, or if it cannot be read."""
        try:
            text = read_file(self.path)
        except DiscoveryError as failure:
            self._report_kept(failure)
            return None
        if text == self._text:
            return text if self.holds else None
        self._text = text
        self._on_change()
        return text

    def _parsed(self, text: bytes) -> Parsed | DiscoveryError:
        try:
            return parse_file(text, self.path, clusters=self._clusters)
        except DiscoveryError as failure:
            return failure

    def _good(self, parsed: Parsed | DiscoveryError) -> list[Entry] | None:
        """Reports the faults and returns the good entries, as `reload` does."""
        if isinstance(parsed, DiscoveryError):
            self._report_kept(parsed)
            return None
        lost = bool(parsed.faults) and not parsed.entries  # a mistake; `endpoints: []` has no faults
        consequence = "the last good endpoints stay, because no entry is valid" if lost else "this endpoint is left out"
        self._report_new([*(f"{fault}; {consequence}" for fault in parsed.faults), *parsed.remarks])
        return None if lost or not self._counts(parsed.entries) else parsed.entries

    def _counts(self, entries: list[Entry]) -> bool:
        """Returns whether the entries are accepted. Reports a list that is suddenly empty."""
        begins = not self.holds
        counts = self._empty.counts(self._now(), empty=not entries, something_known=self._has_entries)
        if counts:
            self._has_entries = bool(entries)
        elif begins:
            event = "the endpoints file is suddenly empty: the last endpoints stay for a while"
            self._report(event, file=self.path, kept_s=HOLD_S)
        return counts

    def _report_kept(self, failure: DiscoveryError) -> None:
        self._empty = EmptyList()  # the list is no longer known to be empty
        self._report_new([f"{fault}; the last good endpoints stay" for fault in failure.faults])

    def _report_new(self, findings: list[str]) -> None:
        new = [finding for finding in findings if finding not in self._reported]
        for finding in new[:FAULTS_SHOWN_MAX]:
            self._report("finding in the endpoints file", **log_fields(finding, self.path))
        if len(new) > FAULTS_SHOWN_MAX:
            self._report("more findings in the endpoints file", file=self.path, count=len(new) - FAULTS_SHOWN_MAX)
        self._reported = frozenset(findings)


async def follow(file: File, use: Callable[[list[Entry]], Any], *, watch: bool = True) -> None:
    """Awaits `use(entries)` after every change of the file. Without `watch`, returns as soon as the file holds no empty list back."""
    async with changes([file.directory]) as next_change:
        while watch or file.holds:
            await next_change(file.wait_s())
            entries = await file.reload_beside()
            if entries is not None:
                await use(entries)
