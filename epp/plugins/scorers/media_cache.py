"""Prefer the endpoint that has encoded the request's media before."""

import msgspec

from epp.candidates import Candidates, Scores
from epp.plugin import Profile, Scorer, plugin
from epp.request import Request
from epp.request.tokens import media_match


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which producer is read.

    producer_name: The producer of the media match to read; empty means mm-embeddings-cache-producer.
    """

    producer_name: str = ""


@plugin("mm-embeddings-cache-scorer")
class MediaCacheScorer(Scorer):
    """Scores endpoints by the share of the request's media items that they have encoded before; 0 without media."""

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._match = media_match(params.producer_name)
        self.consumes = (self._match,)

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        match = request[self._match]
        if match is None or match.held is None:
            return None
        scores: Scores = candidates.narrow(match.held) / match.total
        return scores
