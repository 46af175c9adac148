"""Says which parts of a response the picker reads and why, and whether a configuration can do without the response phase.

With `requestHandler.responsePhase: none` the stream ends when the picker has answered the request. The gateway then passes the model
server's response on without calling the picker. This saves most of the cost of a long response, but the picker does not learn how a request
went or when it ended. Therefore this setting is refused if a plugin has response calls, or reads load in flight (which falls when responses
end). The metrics of requests and decisions remain. There are no metrics of durations, tokens, response sizes, running requests and errors
of model servers.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from epp.data import INFLIGHT_REQUESTS, INFLIGHT_TOKENS, WAITING
from epp.decision.pipeline import Wiring
from epp.plugin import Plugin, ResponseComplete, ResponseReceived, ResponseStreaming

FULL: Final = "full"
NONE: Final = "none"
PHASES: Final = (FULL, NONE)
# WAITING includes the requests sent since the last scrape
IN_FLIGHT: Final = frozenset(key.name for key in (INFLIGHT_REQUESTS, INFLIGHT_TOKENS, WAITING))
RESPONSE_POINTS: Final = (ResponseReceived, ResponseStreaming, ResponseComplete)


def needs(plugins: Iterable[Plugin]) -> list[tuple[str, str]]:
    """Returns (plugin name, reason) for each plugin that needs the response phase."""
    needing = []
    for plugin in plugins:
        read = [key.name for key in plugin.consumes if key.name in IN_FLIGHT]
        if read:
            needing.append((plugin.name, f"reads load in flight ({', '.join(read)})"))
        elif isinstance(plugin, RESPONSE_POINTS):
            needing.append((plugin.name, "is called for responses"))
    return needing


def parts(wiring: Wiring, phase: str) -> dict[str, str]:
    """Returns part of a response that the picker reads -> names of the plugins that need this part. For the log at start."""
    if phase == NONE:
        return {"phase": NONE}
    streaming = wiring.acting(ResponseStreaming)
    complete = wiring.acting(ResponseComplete)
    wanted: dict[str, Sequence[Plugin]] = {
        "usage": [p for p in wiring.parsers if p.reads_usage],
        "headers": [*wiring.acting(ResponseReceived), *(p for p in complete if p.reads_answer)],
        "first_chunk": [p for p in streaming if p.first_chunk_only],
        "every_chunk": [p for p in streaming if not p.first_chunk_only],
        "end": complete,
    }
    return {"phase": FULL} | {part: ", ".join(dict.fromkeys(p.name for p in plugins)) for part, plugins in wanted.items() if plugins}
