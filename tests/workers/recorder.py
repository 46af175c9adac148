"""A logger that keeps what it is told."""

from typing import Any


class Recorder:
    """Stands in for a structlog logger."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def debug(self, event: str, **fields: Any) -> None:
        self.lines.append(("debug", event, fields))

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append(("info", event, fields))

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.append(("warning", event, fields))

    def of(self, event: str) -> list[dict[str, Any]]:
        """The fields of each line of this event."""
        return [fields for _, name, fields in self.lines if name == event]

    def events(self) -> list[str]:
        """All events in order, then forgotten."""
        events = [event for _, event, _ in self.lines]
        self.lines.clear()
        return events
