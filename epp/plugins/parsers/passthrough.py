"""Passes any body on unread, so the request has no model, prompt or usage. Gets the requests whose path no other parser claims."""

from epp.plugin import Parser, plugin
from epp.request import Request


@plugin("passthrough-parser")
class Passthrough(Parser):
    """Accepts any body without reading it, so that the request is scheduled by load alone."""

    def parse(self, request: Request, path: str, body: bytes | memoryview) -> None:
        """Reads nothing."""
