"""What of an answer is looked at, and why; and whether a configuration can do without all of it.

`requestHandler.responsePhase: none` ends the stream with the answer to the request: the gateway passes the model server's answer on
without asking. That saves most of what a long answer costs, and it means that nobody knows how a request went or when it ended.
So it is refused where a plugin is told of answers, or reads a load that falls when answers end. Of the metrics, those of requests
and decisions stay; durations, tokens, sizes of answers, requests running and errors of model servers are missing.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from epp.data import INFLIGHT_REQUESTS, INFLIGHT_TOKENS, WAITING
from epp.pipeline import Recipe
from epp.plugin import Plugin, ResponseComplete, ResponseReceived, ResponseStreaming

FULL: Final = "full"
NONE: Final = "none"
PHASES: Final = (FULL, NONE)
IN_FLIGHT: Final = frozenset(
    key.name for key in (INFLIGHT_REQUESTS, INFLIGHT_TOKENS, WAITING)
)  # WAITING: what was sent since the last scrape counts
TOLD: Final = (ResponseReceived, ResponseStreaming, ResponseComplete)


def needs(plugins: Iterable[Plugin]) -> list[tuple[str, str]]:
    """(plugin, why) of those who cannot do without the response phase."""
    found = []
    for plugin in plugins:
        read = [key.name for key in plugin.consumes if key.name in IN_FLIGHT]
        if read:
            found.append((plugin.name, f"reads load in flight ({', '.join(read)})"))
        elif isinstance(plugin, TOLD):
            found.append((plugin.name, "is told of answers"))
    return found


def parts(recipe: Recipe, phase: str) -> dict[str, str]:
    """What is looked at -> on whose account, in one line each; for the log at start."""
    if phase == NONE:
        return {"phase": NONE}
    streaming = recipe.acting(ResponseStreaming)
    complete = recipe.acting(ResponseComplete)
    wanted: dict[str, Sequence[Plugin]] = {
        "usage": [p for p in recipe.parsers if p.reads_usage],
        "headers": [*recipe.acting(ResponseReceived), *(p for p in complete if p.reads_answer and not p.failures_only)],
        "first_chunk": [p for p in streaming if p.first_chunk_only],
        "every_chunk": [p for p in streaming if not p.first_chunk_only],
        "end": [p for p in complete if not p.failures_only],
        "failures": [p for p in complete if p.failures_only],
    }
    return {"phase": FULL} | {
        part: ", ".join(dict.fromkeys(p.name for p in plugins)) for part, plugins in wanted.items() if plugins
    }
