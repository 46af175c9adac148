"""Always disaggregate."""

from epp.decision import ProfileRun
from epp.plugin import Decider, plugin
from epp.request import Request


@plugin("always-disagg-pd-decider")
class Always(Decider):
    """Yes, whatever the request."""

    def wanted(self, request: Request, run: ProfileRun | None) -> bool:
        return True
