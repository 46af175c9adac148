"""Reports on a load run, as text and HTML. Per task: latency, tokens, hit rate, the share of each endpoint, and errors."""

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles

COLUMNS = (
    "task", "requests", "errors", "first token ms p50", "p95", "between tokens ms p50", "p95", "hit rate",
)  # fmt: skip
NOTHING = "–"
ENDPOINTS_SHOWN = 32
ERRORS_SHOWN = 8


@dataclass(slots=True)
class TaskFigures:
    """The figures of one task. Times are in seconds. Token counts are of the answers that report both; cached ÷ prompt is the hit rate."""

    requests: int = 0
    first_token_s: list[float] = field(default_factory=list)
    between_tokens_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    endpoints: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    def row(self, name: str) -> list[str]:
        """Returns the cells of one row, in the order of `COLUMNS`."""
        hits = f"{self.cached_tokens / self.prompt_tokens:.1%}" if self.prompt_tokens else NOTHING
        times = [cell for seconds in (self.first_token_s, self.between_tokens_s) for cell in _p50_p95(seconds)]
        return [name, str(self.requests), str(self.errors.total()), *times, hits]

    def shares(self) -> str:
        """Lists the endpoints with their shares, the largest first, out of the answers that name an endpoint."""
        total = self.endpoints.total()
        shown = [f"{name} {count / total:.1%}" for name, count in self.endpoints.most_common(ENDPOINTS_SHOWN)]
        more = len(self.endpoints) - len(shown)
        return ", ".join([*shown, *([f"and {more} more"] if more else [])]) or "not told by the gateway"


class TaskReport:
    """Collects the answers of one run, and shows them."""

    def __init__(self) -> None:
        self._tasks: dict[str, TaskFigures] = {}

    def of(self, task: str) -> TaskFigures:
        """Returns the figures of a task. The caller adds to them."""
        return self._tasks.setdefault(task, TaskFigures())

    def text(self) -> str:
        """Returns the report as text for a terminal."""
        rows = [list(COLUMNS), *(figures.row(name) for name, figures in self._sorted())]
        widths = [max(len(row[place]) for row in rows) for place in range(len(COLUMNS))]
        lines = ["Per task", *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)]
        for title, found in self._details():
            lines += ["", title, *(f"  {name}: {what}" for name, what in found)]
        return "\n".join(lines) + "\n"

    def html(self) -> str:
        """Returns the report as a section of an HTML page."""
        parts = ["<section><h2>Per task</h2>", _table([COLUMNS, *(f.row(name) for name, f in self._sorted())])]
        for title, found in self._details():
            parts.append(f"<h3>{title}</h3>{_table([('task', title.lower()), *found])}")
        return "".join(parts) + "</section>"

    def _sorted(self) -> list[tuple[str, TaskFigures]]:
        return sorted(self._tasks.items())

    def _details(self) -> list[tuple[str, list[tuple[str, str]]]]:
        shares = [(name, figures.shares()) for name, figures in self._sorted()]
        errors = [
            (name, f"{count} × {error}") for name, figures in self._sorted() for error, count in figures.errors.most_common(ERRORS_SHOWN)
        ]
        return [("Share per endpoint", shares), *([("Errors", errors)] if errors else [])]


def inserted(page: str, section: str) -> str:
    """Inserts the section at the end of the body of an HTML page."""
    before, end, after = page.rpartition("</body>")
    return f"{before}{section}{end}{after}" if end else page + section


def _p50_p95(seconds: list[float]) -> tuple[str, str]:
    if not seconds:
        return NOTHING, NOTHING
    cuts = quantiles([*seconds, *seconds] if len(seconds) == 1 else seconds, n=20, method="inclusive")
    return f"{cuts[9] * 1e3:.1f}", f"{cuts[18] * 1e3:.1f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [f"<tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in head)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in body]
    return f'<table border="1" cellpadding="4">{"".join(lines)}</table>'
