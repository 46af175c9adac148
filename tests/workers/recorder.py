"""A logger that records its lines."""

from collections.abc import Callable
from typing import Any


def texts(into: list[str]) -> Callable[..., None]:
    """A `report` that appends each line as one text, with what `Rarely` says of a frequent problem."""

    def report(event: str, *, times: int = 0, last: str = "") -> None:
        into.append(f"{event}: {times}; the last: {last}" if times else event)

    return report


class Recorder:
    """Replaces a structlog logger."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def debug(self, event: str, **fields: Any) -> None:
        self.lines.append(("debug", event, fields))

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append(("info", event, fields))

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.append(("warning", event, fields))

    def error(self, event: str, **fields: Any) -> None:
        self.lines.append(("error", event, fields))

    def of(self, event: str) -> list[dict[str, Any]]:
        """The fields of each line of this event."""
        return [fields for _, name, fields in self.lines if name == event]

    def events(self) -> list[str]:
        """All events since the last call, in order."""
        events = [event for _, event, _ in self.lines]
        self.lines.clear()
        return events
