"""Prefill on another server if the decode server would have to compute much of the prompt itself."""

from collections.abc import Sequence

from epp.data import Datum
from epp.decision.decision import ProfileRun
from epp.plugin import Decider, Plugin, plugin
from epp.plugins._parameters import PrefixBasedParameters
from epp.prefix.match import APPROXIMATE, PrefixMatch, prefix_match, read_producer
from epp.request import Request
from epp.request.tokens import TOKENS, token_count


@plugin("prefix-based-pd-decider")
class PrefixBased(Decider):
    """Runs prefill on another server if the decode target would have to compute enough of the prompt itself.

    The condition for a prompt of n tokens is n >= promptTokens and n - cached >= nonCachedTokens. `cached` is the number of prompt tokens
    in the decode target's cache. n is the token producer's count, or else an estimate from bytes. Without a prefix match, `cached` is 0, so
    long prompts still go to prefill servers when a prefix producer fails.
    """

    Params = PrefixBasedParameters
    optional = (TOKENS,)

    def __init__(self, name: str, params: PrefixBasedParameters) -> None:
        super().__init__(name, params)
        self._never = params.non_cached_tokens == 0
        self._tokens_min = max(params.prompt_tokens, params.non_cached_tokens)
        self._uncached_min = params.non_cached_tokens
        self._match: Datum[PrefixMatch]
        self.read_matches_of(params.prefix_match_info_producer_name or APPROXIMATE)
        if self._never:
            self.without_effect = ["nonCachedTokens: is 0, so this decider never disaggregates a request"]

    def read_matches_of(self, producer: str) -> None:
        """Reads, from now on, the matches of the prefix producer with this name."""
        self._match = prefix_match(producer)
        self.consumes = () if self._never else (self._match,)

    def meet(self, plugins: Sequence[Plugin]) -> None:
        self.read_matches_of(read_producer(plugins, self.params.prefix_match_info_producer_name))

    def wanted(self, request: Request, run: ProfileRun | None) -> bool:
        if self._never or run is None:
            return False
        # Use the estimate if the token producer counted 0 because it found only media.
        tokens = token_count(request) or request.prompt.tokens
        if tokens < self._tokens_min:
            return False
        match: PrefixMatch | None = request[self._match]
        cached = 0 if match is None or match.counted is None else int(match.counted[run.row])
        return tokens - cached >= self._uncached_min
