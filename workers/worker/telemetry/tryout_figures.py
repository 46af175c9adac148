"""Counts the requests of one worker while a candidate configuration is tried, by the configuration that decided them."""

from math import isnan
from typing import Final

from epp.decision.decision import Usage
from epp.decision.tryout import CANDIDATE, IN_FORCE
from epp.metrics.series import (
    TRYOUT_CACHED_TOKENS,
    TRYOUT_COMPARED,
    TRYOUT_DECISION,
    TRYOUT_ERRORS,
    TRYOUT_FIRST_TOKEN,
    TRYOUT_PROMPT_TOKENS,
    TRYOUT_REQUESTS,
)
from shm.series import SeriesWriter

PROMPT_TOKENS_MAX: Final = 1 << 32  # a server that reports more tokens is wrong


class TryoutFigures:
    """Counts requests by configuration. Its methods take `tried`: whether the candidate made the decision."""

    def __init__(self, sides: SeriesWriter, shadows: SeriesWriter) -> None:
        self._sides = sides
        self._shadows = shadows
        self._blocks = sides.block((IN_FORCE,)), sides.block((CANDIDATE,))
        at = sides.counter_at
        self._requests, self._errors = at[TRYOUT_REQUESTS.name], at[TRYOUT_ERRORS.name]
        self._prompt, self._cached = at[TRYOUT_PROMPT_TOKENS.name], at[TRYOUT_CACHED_TOKENS.name]

    def ended(self, tried: bool, *, failed: bool, first_token_s: float, usage: Usage | None) -> None:
        """Counts a request that has ended. `first_token_s`: the seconds to the first token; NaN if none came."""
        words, block = self._sides.words, self._blocks[tried]
        words[block + self._requests] += 1
        if failed:
            words[block + self._errors] += 1
        elif not isnan(first_token_s):
            self._sides.observe(block, TRYOUT_FIRST_TOKEN, first_token_s)
        if usage is not None and usage.prompt and 0 < usage.prompt <= PROMPT_TOKENS_MAX:
            words[block + self._prompt] += usage.prompt
            words[block + self._cached] += min(max(usage.cached or 0, 0), usage.prompt)

    def decided(self, tried: bool, seconds: float) -> None:
        """Adds the duration of a decision in seconds: of the decision for a request, or of a shadow decision."""
        self._sides.observe(self._blocks[tried], TRYOUT_DECISION, seconds)

    def compared(self, outcome: str) -> None:
        """Counts a shadow decision. `outcome`: agreed, differed or failed."""
        series = self._shadows
        series.words[series.block((outcome,)) + series.counter_at[TRYOUT_COMPARED.name]] += 1
