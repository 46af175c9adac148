"""Prefill on another server always, or for every request with images, audio or video."""

from epp.decision.decision import ProfileRun
from epp.plugin import Decider, plugin
from epp.request import Request
from epp.request.tokens import TOKENS


@plugin("always-disagg-pd-decider")
class Always(Decider):
    """Runs its stage (usually prefill) on a separate server for every request."""

    def wanted(self, request: Request, run: ProfileRun | None) -> bool:
        return True


@plugin("always-disagg-multimodal-decider")
class Multimodal(Decider):
    """Runs its stage (usually encode) for a request if the token producer found media in one of the prompts."""

    consumes = (TOKENS,)

    def wanted(self, request: Request, run: ProfileRun | None) -> bool:
        tokenized = request[TOKENS]
        return tokenized is not None and any(prompt.features for prompt in tokenized.prompts)
