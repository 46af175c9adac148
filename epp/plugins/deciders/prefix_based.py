"""Prefill elsewhere what the decode target would have to compute itself, if that is much."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from epp.data import Datum
from epp.decision import ProfileRun
from epp.plugin import Decider, Plugin, plugin
from epp.prefix.match import APPROXIMATE, PrefixMatch, prefix_match
from epp.request import Request
from epp.tokens import TOKENS, token_count


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """As in the field: nonCachedTokens 0 means never, promptTokens 0 no such limit.

    `prefixMatchInfoProducerName` is ours: whose matches to read. Empty: those of the prefix producer that the configuration
    lists, or of the approximate one where it lists none or several.
    """

    non_cached_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    prefix_match_info_producer_name: str = ""


@plugin("prefix-based-pd-decider")
class PrefixBased(Decider):
    """Yes if n >= promptTokens and n - cached at the decode target >= nonCachedTokens, for a prompt of n tokens.

    n is the token producer's count where one is configured, else the estimate by bytes.
    Nothing is cached as long as nobody says so: a prefix producer that failed does not keep long prompts on decode servers.
    """

    Params = Parameters
    optional = (TOKENS,)

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._never = params.non_cached_tokens == 0
        self._tokens_min = max(params.prompt_tokens, params.non_cached_tokens)
        self._uncached_min = params.non_cached_tokens
        self._match: Datum[PrefixMatch]
        self.read_matches_of(params.prefix_match_info_producer_name or APPROXIMATE)
        if self._never:
            self.without_effect = ["nonCachedTokens: is 0, so that no request is ever disaggregated"]

    def read_matches_of(self, producer: str) -> None:
        """The name of a prefix producer."""
        self._match = prefix_match(producer)
        self.consumes = () if self._never else (self._match,)

    def meet(self, plugins: Sequence[Plugin]) -> None:
        producers = [p.name for p in plugins for key in p.produces if key.type is PrefixMatch]
        if len(producers) == 1 and not self.params.prefix_match_info_producer_name:
            self.read_matches_of(producers[0])

    def wanted(self, request: Request, run: ProfileRun | None) -> bool:
        if self._never or run is None:
            return False
        tokens = token_count(request) or request.prompt.tokens  # media alone may be all that was found
        if tokens < self._tokens_min:
            return False
        match = request[self._match]
        if match is None or match.blocks is None:
            return True
        cached = int(match.blocks[run.row]) * match.block_tokens
        return tokens - cached >= self._uncached_min
