"""Runs a stage of disaggregated inference on its own server for every request."""

from epp.decision.decision import ProfileRun
from epp.plugin import Decider, plugin
from epp.request import Request


@plugin("always-disagg-pd-decider")
class Always(Decider):
    """Runs its stage (usually prefill) on a separate server for every request."""

    def wanted(self, request: Request, run: ProfileRun | None) -> bool:
        return True
