"""A foreign scanner that raises: the answer goes on without it, and its parser is blamed."""

from typing import Any

from epp.decision.decision import Usage
from epp.errors import blamed
from epp.plugin import NoParams, Parser
from epp.protocol.usage import ANSWER, AnswerHandling
from epp.request import Request
from tests.cases import cases
from tests.pair import Envoy, Pair, bodies
from tests.workers.worker.extproc.streams import BODY, Remembers, pair

PATH = "/v1/foreign"
CHUNK = b'data: {"choices":[{"text":"x"}]}\n\n'


class Breaks:
    """A scanner that raises at one of its points, from the `after`-th chunk on."""

    def __init__(self, point: str, after: int) -> None:
        self.point = point
        self.left = after
        self._raise_at("made")

    def _raise_at(self, point: str) -> None:
        if self.point == point:
            raise ZeroDivisionError(point)

    @property
    def pending(self) -> bool:
        if self.left <= 0:
            self._raise_at("pending")
        return True

    @property
    def usage(self) -> Any:
        self._raise_at("usage")
        return {"prompt": 1} if self.point == "type" else Usage(1, 2, None)

    def feed(self, chunk: bytes) -> None:
        self.left -= 1
        if self.left < 0:
            self._raise_at("feed")


class Foreign(Parser):
    """A parser whose answers are read by a scanner of its own."""

    paths = (PATH,)
    reads_usage = True

    def __init__(self, point: str, after: int) -> None:
        super().__init__("foreign", NoParams())
        self.point, self.after = point, after

    def parse(self, request: Request, path: str, body: bytes | memoryview) -> None:
        request.model = request.target_model = "m"
        request[ANSWER] = AnswerHandling(lambda: Breaks(self.point, self.after))


def opened(parser: Foreign) -> tuple[Pair, Remembers, Envoy]:
    remembers = Remembers()
    site = pair(remembers, parsers=(parser,))
    envoy = site.open()
    envoy.headers(PATH)
    envoy.body(BODY)
    return site, remembers, envoy


@cases("after", [0, 1, 2, 3])
@cases("point", ["made", "pending", "feed", "usage", "type"])
def test_a_scanner_that_raises_is_left_out_for_this_answer_and_its_parser_is_blamed_once(point: str, after: int) -> None:
    parser = Foreign(point, after)
    site, remembers, envoy = opened(parser)
    answers = envoy.response_headers(kind="text/event-stream")
    for _ in range(4):  # the first chunk takes the slow path, the others the fast one
        answers += envoy.response_body(CHUNK, last=False)
    answers += envoy.response_body(b"data: [DONE]\n\n")
    assert bodies(answers, "response_body") == (4 * CHUNK + b"data: [DONE]\n\n", [False] * 4 + [True])
    assert envoy.stream.ended is None
    assert [blamed(problem) for problem in site.faults] == [parser]
    assert site.counter("faults_total") == 1
    assert (remembers.statuses, remembers.usages) == ([200], [None])
    assert site.inflight == [0] * len(site.inflight)


def test_the_next_answer_gets_a_scanner_again() -> None:
    parser = Foreign("feed", 1)
    site, remembers, envoy = opened(parser)
    envoy.response_headers(kind="text/event-stream")
    envoy.response_body(CHUNK, last=False)
    envoy.response_body(CHUNK)
    other = site.open()
    other.headers(PATH)
    other.body(BODY)
    other.response_headers()
    other.response_body(CHUNK)
    assert remembers.usages == [None, Usage(1, 2, None)]
    assert len(site.faults) == 1
