"""Lets replicas that share nothing agree, without a message, on where new prefixes go: by rendezvous hashing.

A replica does not know to which endpoints other replicas have sent which prefixes. If each replica places a new prefix by load alone, the
prefix is computed once per replica. This scorer names two endpoints for a prefix, by the hash of the first block that at most two endpoints
hold. Hashes follow from prompt and secret, so every replica with the same secret (--prefix-secret-file) names the same two endpoints.

Two endpoints may hold a block because both were named for it, so a block with two holders can still decide. A shared system prompt spreads
to more endpoints when the named endpoints are busy. Once three endpoints hold a block, the next block decides, so conversations get their
own endpoints. The idea of two hashed choices per prefix is from DualMap (arXiv 2602.06502).
"""

from typing import Final

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from epp.candidates import Candidates, EndpointList, Scores
from epp.data import RUNNING, WAITING
from epp.plugin import Hashes, Profile, Scorer, Services, plugin
from epp.prefix.match import APPROXIMATE, FollowsMatches, PrefixMatch, prefix_match
from epp.request import Request

NAMED: Final = 2
# A named endpoint scores 0 if it has more than BUSY_SHARE x mean + BUSY_MORE requests. The requests are those that servers report, because
# this replica does not know what the others have in flight.
BUSY_SHARE: Final = 1.5  # factor for the mean of all candidates
BUSY_MORE: Final = 1.0  # requests; with hardly any requests, one more is no imbalance
# The finaliser of SplitMix64: every bit of block and endpoint affects every bit of the rank.
MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
MIX_2: Final = np.uint64(0x94D049BB133111EB)
SHIFT_1, SHIFT_2, SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which producer is read.

    prefix_match_info_producer_name: The producer of the prefix matches to read.
    """

    prefix_match_info_producer_name: str = ""


@plugin("prefix-rendezvous-scorer")
class PrefixRendezvous(FollowsMatches, Scorer):
    """Scores 1 for the two endpoints named for the first block of the prompt that at most two candidates hold; 0 for the others.

    A named endpoint beats an unnamed one whose other scores are better by at most this scorer's weight. A named endpoint scores 0 while it
    has more running and waiting requests than 1.5 times the mean plus 1. The last block is used only if it is whole. There are no scores if
    three candidates hold every block, or if there are fewer than three candidates.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        self.consumes = (self._match, RUNNING, WAITING)
        self._secret: int
        self._endpoint_list = EndpointList(())
        self._ids: Hashes = np.empty(0, np.uint64)  # hashes of the endpoints' addresses, by row of the endpoint list

    def start(self, services: Services) -> None:
        self._secret = services.prefix_seed

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        match: PrefixMatch | None = request[self._match]
        if match is None or len(candidates) <= NAMED:
            return None
        block = 0
        if match.blocks is not None:
            block = int(np.partition(candidates.narrow(match.blocks), ~NAMED)[~NAMED])
        if block >= min(match.total, match.tokens // match.block_tokens):  # only a part of a long prompt is hashed
            return None
        if candidates.snapshot.endpoint_list is not self._endpoint_list:
            self._follow(candidates.snapshot.endpoint_list)
        ids = self._ids if candidates.rows is None else self._ids[candidates.rows]
        named = np.argpartition(_ranks(ids ^ match.hashes[block]), -NAMED)[-NAMED:]
        busy = candidates[RUNNING] + candidates[WAITING]
        scores = candidates.zeros()
        scores[named[busy[named] <= BUSY_SHARE * busy.mean() + BUSY_MORE]] = 1.0
        return scores

    def _follow(self, endpoint_list: EndpointList) -> None:
        self._endpoint_list = endpoint_list
        addresses = (endpoint.address.encode() for endpoint in endpoint_list.endpoints)
        self._ids = np.array([xxh3_64_intdigest(address, self._secret) for address in addresses], np.uint64)


def _ranks(words: Hashes) -> Hashes:
    words = (words ^ (words >> SHIFT_1)) * MIX_1
    words = (words ^ (words >> SHIFT_2)) * MIX_2
    return words ^ (words >> SHIFT_3)
