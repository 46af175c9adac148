"""Shows an explanation as text: lines about the request, then for each profile its filters and a table of its candidates."""

import datetime
import textwrap
from collections.abc import Iterator, Sequence

from epp.decision.explain import Cached, Candidate, Explanation, Profiled
from epp.errors import Cause
from workers.cli.output import table
from workers.host.printable import printable
from workers.supervisor.pages.decisions import Opened

PICKED = "*"
FAULT = f"{Cause.INTERNAL.value}: "
WIDTH = 100  # columns of the output
PREDICTED = "predicted cached"


def receipt_lines(opened: Opened) -> Iterator[str]:
    """Returns the lines that `epp explain RECEIPT` prints: the content of the receipt, and the decision if a worker remembers it."""
    when = datetime.datetime.fromtimestamp(opened.at, datetime.UTC)
    yield f"decided at {when:%Y-%m-%d %H:%M:%S} UTC by worker {opened.worker} with configuration {opened.configuration}"
    yield f"sent to {opened.target}: {opened.reason}"
    if opened.margin is not None:
        yield f"margin {opened.margin:.3f} over {opened.runner_up}"
    if opened.cached_tokens is not None:
        yield f"predicted {opened.cached_tokens} prompt tokens in its prefix cache"
    if opened.first_token_s is not None:
        yield f"predicted first token after {opened.first_token_s * 1e3:.0f} ms"
    yield ""
    if opened.explanation is None:
        yield "no worker remembers the decision any more: the receipt is all that is left"
    else:
        yield from lines(opened.explanation)


def lines(e: Explanation) -> Iterator[str]:
    """Returns the lines that `epp explain` prints. Escapes only the cells of tables, because escapes change their width."""
    ago = f"{e.ago_s:.1f} s ago  " if e.ago_s else ""
    yield f"request {e.request_id or '(no id)'}  {ago}worker {e.worker}"
    target = f" as {e.target_model}" if e.target_model != e.model else ""
    pool = f"pool {e.pool}  " if e.pool else ""
    yield f"{pool}model {e.model or '(none)'}{target}  flow {e.flow}  priority {e.priority}  {e.body_bytes} bytes"
    if e.refused.startswith(FAULT):
        yield f"failed with 500: {e.refused.removeprefix(FAULT)}"
    elif e.refused:
        yield f"refused: {e.refused}"
    else:
        yield f"sent to {', '.join(e.targets)} by profile '{e.primary}'"
    if e.outcome:
        yield e.outcome
    for name, value in e.headers.items():
        yield f"with header {name}: {value}"
    if e.cached is not None:
        yield _cached(e.cached)
    if e.left_out:
        yield f"without {', '.join(e.left_out)}: left out for a while after too many faults"
    if e.unscored:
        yield f"without {', '.join(e.unscored)}: raised an exception, see the log"
    for profile in e.profiles:
        yield ""
        yield from _profile(profile)


def _cached(cached: Cached) -> str:
    predicted = f"predicted {cached.predicted} prompt tokens in its prefix cache"
    if cached.prompt is None:
        return predicted
    if cached.reported is None:
        return f"{predicted}; its answer does not say how many of {cached.prompt} were cached"
    return f"{predicted}; it reported {cached.reported} of {cached.prompt}"


def _profile(profile: Profiled) -> Iterator[str]:
    kind = "shadow profile" if profile.shadow else "profile"
    yield f"{kind} '{profile.profile}': {profile.considered} endpoints"
    for step in profile.filters:
        names = ", ".join(step.names) + (", …" if step.dropped > len(step.names) else "")
        yield f"  filter {step.filter}: keeps {step.kept}, drops {step.dropped}{f' ({names})' if names else ''}"
    if not profile.candidates:
        yield "  no endpoint is left"
        return
    rows = [_header(profile), *(_row(profile, i) for i in range(len(profile.candidates)))]
    header, *rows = ([printable(cell) for cell in row] for row in rows)
    for number, part in enumerate(tables(header, rows, WIDTH - 2)):
        if number:
            yield ""
        yield from ("  " + line for line in part)
    for candidate in profile.candidates:
        if candidate.latency:
            text = printable(f"{candidate.endpoint}: {candidate.latency}")
            yield from textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ")
    if profile.more:
        yield f"  … and {profile.more} more, all with a lower total"
    yield f"  {profile.picker} picks {', '.join(profile.picked)}{_why(profile)}"


def _header(profile: Profiled) -> list[str]:
    first = profile.candidates[0]
    scores = (f"{s.scorer} ×{s.weight:g}" for s in first.scores)
    return ["", "endpoint", "state", "total", *scores, *first.values, *(_predicted(first) and [PREDICTED])]


def _row(profile: Profiled, index: int) -> list[str]:
    candidate = profile.candidates[index]
    return [
        PICKED if candidate.picked else "",
        candidate.endpoint,
        candidate.state,
        f"{candidate.total:.3f}",
        *(f"{s.raw:.3f} → {s.weighted:.3f}" for s in candidate.scores),
        *(f"{value:g}" for value in candidate.values.values()),
        *_predicted(candidate),
    ]


def _predicted(candidate: Candidate) -> list[str]:
    """Returns the last cell of a candidate's row: the predicted cached tokens. Returns no cell without a prediction."""
    return (
        []
        if candidate.predicted_tokens is None
        else [f"{candidate.predicted_tokens} ({candidate.prefix_cache})" if candidate.prefix_cache else str(candidate.predicted_tokens)]
    )


def _why(profile: Profiled) -> str:
    if profile.margin is None:
        return ": the only one left"
    if profile.tied > 1:
        return f": one of {profile.tied} with the same total, chosen by the picker"
    if profile.margin < 0:
        return f", {-profile.margin:.3f} below {profile.runner_up}: this picker does not always take the best"
    return f", {profile.margin:.3f} above {profile.runner_up}"


def tables(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[list[str]]:
    """Lays out a table in parts that are at most `width` wide. Each part begins with the first two columns: mark and endpoint."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    start = 2
    while start < len(header):
        end, used = start, widths[0] + 2 + widths[1]
        while end < len(header) and (end == start or used + 2 + widths[end] <= width):
            used += 2 + widths[end]
            end += 1
        parts = [[*row[:2], *row[start:end]] for row in (header, *rows)]
        yield table(parts[0], parts[1:])
        start = end
