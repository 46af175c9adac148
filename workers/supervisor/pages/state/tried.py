"""Computes the figures of a candidate configuration that is tried, and those of the configuration in force."""

from collections.abc import Sequence

import msgspec

from epp.decision.tryout import CANDIDATE, IN_FORCE, WHOLE
from workers.shared.reload_status import TryoutStatus


class TriedSide(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of one configuration since the tryout of a candidate began. None means unknown.

    `computed_tokens`: prompt tokens per request that were not cached. `decision_s`: mean duration of a decision in seconds.
    """

    configuration: str
    requests: int
    errors: int
    error_share: float | None
    first_token_p50_s: float | None
    first_token_p95_s: float | None
    cached_share: float | None
    computed_tokens: float | None
    decision_s: float | None


class TryoutFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The candidate that is tried. `share`: the share of the requests that it decides.

    If `share` is 0, the decisions of the candidate are only compared with the real ones, and counted as `agreed`, `differed` or `failed`.
    """

    generation: int
    hash: str
    source: str
    share: float
    by: str
    since: float
    agreed: int
    differed: int
    failed: int
    sides: Sequence[TriedSide]


def tryout_figures(tried: TryoutStatus | None) -> TryoutFigures | None:
    """Returns the figures of the candidate that is tried; None if there is none."""
    if tried is None:
        return None
    named = ((IN_FORCE, tried.in_force), (CANDIDATE, tried.candidate))
    return TryoutFigures(
        generation=tried.generation,
        hash=tried.hash,
        source=tried.source,
        share=tried.share.millionths / WHOLE,
        by=tried.share.by,
        since=tried.since,
        agreed=tried.agreed,
        differed=tried.differed,
        failed=tried.failed,
        sides=[
            TriedSide(
                configuration=name,
                requests=side.requests,
                errors=side.errors,
                error_share=side.error_share,
                first_token_p50_s=side.first_token_s(0.5),
                first_token_p95_s=side.first_token_s(0.95),
                cached_share=side.cached_share,
                computed_tokens=side.computed_tokens,
                decision_s=side.seconds_per_decision,
            )
            for name, side in named
        ],
    )
