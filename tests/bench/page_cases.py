"""Measures parsing: the 32 KB metrics page of a server, and requests of 1, 8 and 400 KB in each parser."""

from collections.abc import Callable, Iterator
from typing import cast

import msgspec

from epp.config import registry
from epp.data import ACTIVE_MODELS, WAITING_MODELS
from epp.plugin import NoParams, Parser
from epp.plugins.extractors.core_metrics import CORE, CoreMetricsExtractor, Extraction
from epp.request import Request
from loadtest.sim.engine import Engine, EngineSettings
from loadtest.sim.exposition import MetricsPage
from tests.bench.cases import Case
from tests.bench.prefix_cases import chat
from workers.supervisor.endpoints.http_answer import ServerAnswer

PAGE_BYTES = 32_000
PAGE_US = 50.0
PIECE_BYTES = 16_384  # of the page per read from the socket
SIZES = (("1 KB", 1_000), ("8 KB", 8_000), ("400 KB", 400_000))
COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
PARSED = (("openai-parser", COMPLETIONS), ("openai-parser", CHAT), ("anthropic-parser", MESSAGES))


def page_cases() -> Iterator[Case]:
    """Yields cases for scrapes and parsers."""
    page = metrics_page()
    extractor = CoreMetricsExtractor("core", CoreMetricsExtractor.Params())
    extraction = extractor.extraction({}, (*CORE, ACTIVE_MODELS, WAITING_MODELS))
    yield Case("scrape: values of a 32 KB page", lambda: extraction.extract(page))
    yield Case("scrape: the same from its HTTP answer in pieces", scraped(extraction, page), PAGE_US)
    for label, size in SIZES:
        for name, path in PARSED:
            yield Case(f"{name}: {path}, {label}", parsed(name, path, size))


def metrics_page() -> bytes:
    """Returns a simulated server's page with more lines, because pages of real engines are longer."""
    rendered = MetricsPage(Engine(EngineSettings()), "m", 1.7e9).render(1.7e9)
    line = b'vllm:other_seconds_bucket{engine="0",le="0.%03d",model_name="m"} 17.0\n'
    return rendered + b"".join(line % number for number in range((PAGE_BYTES - len(rendered)) // len(line % 0)))


def scraped(extraction: Extraction, page: bytes) -> Callable[[], object]:
    """Returns a call that goes from the bytes of the socket to the scraped values."""
    head = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-length: %d\r\ncontent-type: text/plain\r\n\r\n" % len(page)
    data = head + page
    pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
    answer = ServerAnswer()

    def run() -> object:
        answer.reset()
        for piece in pieces:
            body = answer.receive(piece)
        assert body is not None
        return extraction.extract(body)

    return run


def parsed(name: str, path: str, size: int) -> Callable[[], object]:
    """Returns a call that goes from a body to the fields that a decision needs.

    Leaves out the canonical bytes, which are computed later and only once.
    """
    parser = cast("type[Parser]", registry.known()[name])(name, NoParams())
    body = chat(size)
    if path == COMPLETIONS:
        body = msgspec.json.encode({"model": "m", "prompt": "hello " * (size // 6), "max_tokens": 9})

    def run() -> object:
        request = Request(id="r", path=path, headers={}, now=0.0)
        return parser.parse(request, path, body)

    return run
