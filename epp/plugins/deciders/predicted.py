"""Prefill on another server if the learned latency model predicts an earlier first token that way."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from epp.candidates import EndpointList, Mask
from epp.decision.decision import ProfileRun
from epp.endpoints.label_selectors import PREFILL_ROLES, ROLE_LABEL
from epp.learning.costs import learned_costs
from epp.plugin import Decider, Plugin, plugin
from epp.plugins._parameters import PredictedParameters
from epp.prefix.match import APPROXIMATE, prefix_match, read_producer
from epp.request import Request
from epp.request.tokens import TOKENS, token_count

MS: Final = 1000.0
THOUSAND: Final = 1000.0


@plugin("predicted-pd-decider")
class Predicted(Decider):
    """Runs prefill on another server if this is predicted to bring the first token more than `minGainMs` sooner.

    The plugin compares the predicted time at the decode target with the shortest predicted time of the prefill servers, plus the time to
    transfer the tokens that the decode target has not cached. Without the model, `nonCachedTokens` decides, as in prefix-based-pd-decider.
    """

    Params = PredictedParameters
    optional = (TOKENS,)

    def __init__(self, name: str, params: PredictedParameters) -> None:
        super().__init__(name, params)
        self._costs = learned_costs(params.learned_latency_producer_name)
        self._match = prefix_match(APPROXIMATE)
        self.consumes = (self._costs, self._match)
        self._endpoint_list = EndpointList(())
        self._prefill: Mask = np.zeros(0, dtype=bool)

    def meet(self, plugins: Sequence[Plugin]) -> None:
        self._match = prefix_match(read_producer(plugins))
        self.consumes = (self._costs, self._match)

    def wanted(self, request: Request, run: ProfileRun | None) -> bool:
        if run is None:
            return False
        uncached = self._uncached(request, run.row)
        learned = request[self._costs]
        if learned is None or learned.why_not:
            return bool(uncached >= self.params.non_cached_tokens)
        endpoint_list = run.candidates.snapshot.endpoint_list
        if endpoint_list is not self._endpoint_list:
            self._endpoint_list = endpoint_list
            self._prefill = np.array([e.labels.get(ROLE_LABEL) in PREFILL_ROLES for e in endpoint_list.endpoints], dtype=bool)
        times = learned.first_token_s[self._prefill]
        if not len(times):
            return False
        transfer_ms = self.params.transfer_ms_per_thousand_tokens * uncached / THOUSAND
        gain_ms = MS * float(learned.first_token_s[run.row] - times.min()) - transfer_ms
        return bool(gain_ms > self.params.min_gain_ms)

    def _uncached(self, request: Request, row: int) -> float:
        """Returns how many tokens of the prompt the endpoint in this row would have to compute."""
        tokens = token_count(request) or request.prompt.tokens
        match = request[self._match]
        cached = 0.0 if match is None or match.counted is None else float(match.counted[row])
        return max(0.0, tokens - cached)
