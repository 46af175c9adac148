"""Collects the events that a component reports."""

from typing import Any


class Reports(list[str]):
    """The reports, in order. Each is a line: the event, then its fields as `name=value`."""

    def __call__(self, event: str, **fields: Any) -> None:
        self.append(" ".join([event, *(f"{name}={value}" for name, value in fields.items())]))
