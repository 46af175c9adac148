"""What the checks of the page `/ui` in a browser share (`tests.ui.run`)."""

from pathlib import Path
from typing import Any

SHOTS = Path(".cache/ui")
SERIOUS = ("serious", "critical")
WAIT_MS = 15_000


class Check:
    """Collects what is wrong."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def that(self, holds: bool, what: str) -> None:
        print(f"{'ok    ' if holds else 'WRONG '} {what}", flush=True)
        if not holds:
            self.wrong.append(what)


def serious(page: Any, axe: str) -> list[Any]:
    """Returns what axe-core finds serious in the present view."""
    page.evaluate(axe)
    script = "axe.run().then((result) => result.violations.map((v) => [v.id, v.impact, v.nodes[0].html]))"
    return [each for each in page.evaluate(script) if each[1] in SERIOUS]


def fits(page: Any) -> bool:
    """Returns whether the page is as wide as the window: tables scroll in their frames."""
    return not page.evaluate("document.documentElement.scrollWidth > innerWidth")
