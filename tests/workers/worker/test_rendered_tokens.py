"""A token producer on a worker's services: a server on loopback renders prompts while decisions wait."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web

from epp.decision.decide import choose
from epp.decision.pipeline import WiredProfile, Wiring, compile_pipeline
from epp.learning.local import LocalLearning
from epp.metrics.catalogue import plugin_groups
from epp.plugin import NoParams
from epp.plugins.parsers.openai import OpenAI
from epp.plugins.pickers.max_score import MaxScore
from epp.plugins.producers.tokenizer import Tokens
from epp.plugins.profiles import SingleProfile
from epp.request import Request
from epp.request.tokens import TOKENS
from shm.prefills import local_prefills
from shm.segment import Region
from shm.series import SeriesWriter
from tests.fakes import FakePool, FakeServices, candidates
from tests.waiting import until
from tests.workers.worker.test_services import areas
from workers.process.layout import series_schema_of
from workers.worker.held import NoHeldBlocks
from workers.worker.services import WorkerServices

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PARSER = OpenAI("o", NoParams())


class Site:
    """A render server, and a pipeline that uses it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.hangs = False
        self.pool = FakePool(candidates({"waiting_requests": [0, 0]}))

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen.append((request.path, body))
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        ids = [len(json.dumps(body.get("messages") or body.get("prompt"))), 2, 3]
        return web.json_response([{"token_ids": ids}] if "prompt" in body else {"token_ids": ids})

    async def run(self, scenario: Callable[["Site"], Awaitable[None]]) -> None:
        runner = web.ServerRunner(web.Server(self.answer), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        params = {"modelName": "base", "vllm": {"url": url, "timeout": "300ms"}}
        producer, picker = Tokens("t", msgspec.convert(params, Tokens.Params)), MaxScore("m", MaxScore.Params())
        self.pipeline = compile_pipeline(
            Wiring(
                plugins=(producer, picker),
                parsers=(PARSER,),
                handler=SingleProfile("h", NoParams()),
                profiles=(WiredProfile("default", ((picker, 1.0),)),),
                producers=(producer,),
            )
        )
        (group,) = plugin_groups(producer.metrics)
        series = series_schema_of(group, areas=1)
        services = WorkerServices(
            areas().area(0),
            FakeServices(),
            prefix_seed=1,
            held_blocks=NoHeldBlocks(),
            prefills=local_prefills(),
            learning=LocalLearning(),
            rng=random.Random(1),
            measures={},
            labelled={group.name: SeriesWriter(series, Region(memoryview(bytearray(series.bytes))))},
            now=asyncio.get_running_loop().time,
        )
        self.pipeline.start(services)
        try:
            async with asyncio.timeout(20):
                await scenario(self)
        finally:
            await services.close()
            await runner.cleanup()

    async def decided(self, path: str, **body: object) -> Request:
        request = Request(id="r", path=path, headers={}, now=0.0)
        PARSER.parse(request, path, msgspec.json.encode({"model": "tuned", **body}))
        assert (await choose(self.pipeline, request, self.pool)).targets
        return request


def run(scenario: Callable[[Site], Awaitable[None]]) -> Site:
    site = Site()
    asyncio.run(site.run(scenario))
    return site


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": [{"role": "user", "content": "hi"}]}), (COMPLETIONS, {"prompt": "hi"})])
def test_a_prompt_is_rendered_by_the_server_while_the_decision_waits(path: str, body: dict[str, Any]) -> None:
    async def scenario(site: Site) -> None:
        request = await site.decided(path, **body)
        tokenized = request[TOKENS]
        assert tokenized is not None and tokenized.count == 3

    site = run(scenario)
    assert (f"{path}/render", {"model": "base", **body}) in site.seen
    assert site.pool.failures == []


def test_the_server_is_warmed_up_with_text_and_an_image_before_requests_come() -> None:
    async def scenario(site: Site) -> None:
        await until(lambda: len(site.seen) >= 2)

    warm_ups = run(scenario).seen
    assert [path for path, _ in warm_ups] == [f"{CHAT}/render"] * 2
    assert ["image_url" in json.dumps(body) for _, body in warm_ups] == [False, True]


def test_a_hanging_server_delays_a_decision_by_the_timeout_and_gives_no_tokens() -> None:
    async def scenario(site: Site) -> None:
        site.hangs = True
        request = await site.decided(COMPLETIONS, prompt="hi")
        assert request[TOKENS] is None

    (failure,) = run(scenario).pool.failures
    assert "not done within 0.3 s" in str(failure)
