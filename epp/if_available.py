"""`Prefer: if-available`: an endpoint only if it holds the beginning of the prompt in its cache already.

A caller that would rather compute the prompt elsewhere says so in this header (RFC 7240). Such a request is decided like any other,
but before anything is told of it, it is refused (412) unless the chosen endpoint matches a block of its prompt. Where no
configured producer matches prefixes, none does.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from epp.decision import Decision
from epp.errors import Cause, Refused
from epp.pipeline import Pipeline
from epp.plugin import Scorer
from epp.prefix.prediction import compared_match
from epp.request import Request

PREFER: Final = "prefer"
IF_AVAILABLE: Final = "if-available"


def asked(headers: Mapping[str, str]) -> bool:
    """Whether the preference is among those in the header; parameters do not matter."""
    preferences = headers.get(PREFER, "").split(",")
    return any(p.partition(";")[0].strip().lower() == IF_AVAILABLE for p in preferences)


def conditional(pipeline: Pipeline) -> Pipeline:
    """The pipeline that refuses after the decision, before the first PreRequest plugin."""
    key = compared_match(pipeline.recipe.producers, pipeline.recipe.of(Scorer))

    def gate(request: Request, decision: Decision) -> None:
        match = None if key is None else request[key]
        run = decision.runs.get(decision.primary)
        blocks = None if match is None else match.blocks
        if run is not None and blocks is not None and blocks.item(run.row) > 0:
            return
        raise Refused(Cause.NOT_CACHED)

    return replace(pipeline, pre_request=(gate, *pipeline.pre_request))
