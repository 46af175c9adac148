"""The parser of OpenAI's API, and the parser of all other paths, which reads nothing."""

from epp.plugin import Parser, plugin
from epp.plugins.parsers import _openai
from epp.request import Request


@plugin("openai-parser")
class OpenAI(Parser):
    """Reads OpenAI's API: completions, chat, embeddings, responses, conversations, images, and the render variants."""

    paths = tuple(_openai.API)
    app_protocols = ("h2c", "http")
    reads_usage = True
    names_model = True
    salt_member = "cache_salt"

    def parse(self, request: Request, path: str, body: bytes | memoryview) -> None:
        _openai.named(request, _openai.read(request, _openai.api_of(path), body))


@plugin("passthrough-parser")
class Passthrough(Parser):
    """Accepts any body without reading it, so that the request is scheduled by load alone."""

    def parse(self, request: Request, path: str, body: bytes | memoryview) -> None:
        """Reads nothing."""
