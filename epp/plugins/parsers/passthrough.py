"""Any bytes: no model, no prompt, no usage. The fallback, since it claims no path."""

from epp.plugin import Parser, plugin
from epp.request import Request


@plugin("passthrough-parser")
class Passthrough(Parser):
    """Routes by load alone."""

    def parse(self, request: Request, path: str, body: bytes | memoryview) -> None:
        """Nothing is read."""
