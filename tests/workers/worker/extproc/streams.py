"""What tests of ext_proc streams share: bodies, plugins that wait, deny or break, and a pair of ends with a pool."""

import json
from collections.abc import Generator
from typing import Any

from epp.candidates import Candidates
from epp.data import WAITING
from epp.decision.decision import Decision, Response, Usage
from epp.decision.pipeline import WiredProfile, Wiring, compile_pipeline
from epp.errors import Cause, Refused
from epp.plugin import DataProducer, NoParams, Parser, Plugin, ResponseComplete
from epp.plugins.parsers.openai import OpenAI, Passthrough
from epp.plugins.pickers.max_score import MaxScore
from epp.plugins.profiles import SingleProfile
from epp.plugins.scorers.reported import QueueDepth
from epp.request import Request
from tests.fakes import FakePool, FakeServices, candidates
from tests.pair import Pair

BODY = b'{"model":"m", "prompt":"hello",  "max_tokens":9}'
USAGE = b'{"id":"1","usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":5}}}'


class Remembers(ResponseComplete):
    def __init__(self) -> None:
        super().__init__("remembers", NoParams())
        self.usages: list[Usage | None] = []
        self.statuses: list[int] = []
        self.failed: list[bool] = []

    def response_complete(self, request: Request, decision: Decision, response: Response) -> None:
        self.statuses.append(response.status)
        self.failed.append(response.failed)
        self.usages.append(response.usage)


class Future:
    def __init__(self) -> None:
        self.callback: Any = None

    def add_done_callback(self, callback: Any) -> None:
        self.callback = callback

    def __await__(self) -> Generator["Future", None, None]:
        yield self


class Waits(DataProducer):
    def __init__(self) -> None:
        super().__init__("waits", NoParams())
        self.future = Future()

    def produce(self, request: Request, candidates: Candidates) -> Any:
        return self.future


class Denies(DataProducer):
    def produce(self, request: Request, candidates: Candidates) -> None:
        raise Refused(Cause.NO_ENDPOINT_LEFT)


class Broken(DataProducer):
    def produce(self, request: Request, candidates: Candidates) -> None:
        raise ZeroDivisionError


def pair(*others: Plugin, waiting: tuple[float, ...] = (2, 0, 1), parsers: tuple[Parser, ...] = (), **more: Any) -> Pair:
    picker, scorer = MaxScore("p", MaxScore.Params()), QueueDepth("q", NoParams())
    parsers = (OpenAI("o", NoParams()), *parsers, Passthrough("x", NoParams()))
    pipeline = compile_pipeline(
        Wiring(
            plugins=(picker, scorer, *parsers, *others),
            parsers=parsers,
            handler=SingleProfile("h", NoParams()),
            profiles=(WiredProfile("default", ((scorer, 1.0), (picker, 1.0))),),
            producers=tuple(p for p in others if isinstance(p, DataProducer)),
            columns=(WAITING,),
        )
    )
    pipeline.start(FakeServices())
    return Pair(pipeline, FakePool(candidates({"waiting_requests": list(waiting)}, count=len(waiting))), **more)


def refusal(responses: list[Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
    (response,) = responses
    immediate = response.immediate_response
    headers = {o.header.key: o.header.raw_value.decode() for o in immediate.headers.set_headers}
    return immediate.status.code, json.loads(immediate.body)["error"], headers
