"""`Prefer: if-available`: serve the request only if the chosen endpoint already caches the beginning of its prompt.

A client that would rather compute the prompt elsewhere sends this preference (RFC 7240). Such a request is decided like any other.
Before the first PreRequest plugin runs, it is refused with 412 unless at least one block of its prompt matches at the chosen
endpoint. Without a configured producer of prefix matches it is always refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from epp.decision.decision import Decision
from epp.decision.pipeline import Pipeline
from epp.errors import Cause, Refused
from epp.plugin import Scorer
from epp.prefix.prediction import compared_match
from epp.request import Request
from epp.request.client_headers import PREFER

IF_AVAILABLE: Final = "if-available"


def requested(headers: Mapping[str, str]) -> bool:
    """Returns whether the header `Prefer` lists `if-available`. Ignores parameters of the preference."""
    preferences = headers.get(PREFER, "").split(",")
    return any(p.partition(";")[0].strip().lower() == IF_AVAILABLE for p in preferences)


def conditional(pipeline: Pipeline) -> Pipeline:
    """Returns the same pipeline with a first PreRequest call that refuses the request unless its prompt is cached at the target."""
    key = compared_match(pipeline.wiring.producers, pipeline.wiring.of(Scorer))

    def gate(request: Request, decision: Decision) -> None:
        match = None if key is None else request[key]
        run = decision.runs.get(decision.primary)
        cached = None if match is None else match.cached
        if run is not None and cached is not None and cached.item(run.row) > 0:
            return
        raise Refused(Cause.NOT_CACHED)

    return replace(pipeline, pre_request=(gate, *pipeline.pre_request))
