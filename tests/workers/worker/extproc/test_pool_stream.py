"""Streams at a port of several pools: which app serves a request, and what happens until that is known."""

import gzip
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from epp.errors import Cause, Refused
from epp.protocol import codec
from epp.protocol.models import Listed, Model, listed
from epp.request.pool_choice import KEY, UNDECIDED, Matched, PoolChoice
from epp.request.tenant_keys import parse
from epp.request.tenants import FromKey, Tenants
from loadtest.load.proto import ext_proc_pb2 as pb
from tests.epp.request.test_tenant_keys import hashed
from tests.pair import Envoy, FakeStream, Pair, bodies, set_headers
from tests.workers.worker.extproc.streams import Waits, pair, refusal
from workers.worker.extproc.app import App
from workers.worker.extproc.pool_stream import PooledRequestPhase, open_pooled
from workers.worker.extproc.request_phase import LONG_BODY
from workers.worker.extproc.stream import PATH
from workers.worker.extproc.tried_stream import Tryout

DESTINATION = "x-gateway-destination-endpoint"


class Worker:
    """Four pools, by port and authority, by authority and model, by model, and by metadata. The last endpoint of each is the best."""

    def __init__(self, third: Pair | None = None) -> None:
        self.choice = PoolChoice(
            [Matched("a", 9102, ("a.svc",)), Matched("b", 0, ("b.svc",), ("phi-*", "m")), Matched("c", 0, (), ("café",)), Matched("d")]
        )
        self.pairs = [pair(waiting=(5,)), pair(waiting=(5, 0)), third or pair(waiting=(5, 5, 0)), pair(waiting=(5, 5, 5, 0))]

        self.loaded = {0, 1, 2, 3}
        self.waiting: list[Callable[[], None]] = []
        self.unusable = False
        self.tries = False

    def tryout(self, pool: int) -> Tryout | None:
        return None

    def app(self, pool: int) -> App | None:
        return self.pairs[pool].app if pool in self.loaded else None

    def wanted(self, pool: int, then: Callable[[], None]) -> None:
        if self.unusable:
            raise Refused(Cause.INTERNAL, "pool cannot be loaded")
        self.waiting.append(then)

    def load(self, *pools: int) -> None:
        self.loaded |= set(pools)
        waiting, self.waiting = self.waiting, []
        for then in waiting:
            then()

    def name(self, pool: int) -> str:
        return "abcd"[pool] if pool != UNDECIDED else ""

    def lobby(self) -> App:
        return self.pairs[0].app

    def models(self, headers: codec.Headers, message: bytes, then: Callable[[], None]) -> bytes | None:
        if not self.loaded:
            self.waiting.append(then)
            return None
        if headers.get("x-key") == "wrong":
            raise Refused(Cause.UNKNOWN_TENANT)
        assert codec.metadata_text(message, b"envoy.lb", (KEY.encode(),)) == ""
        return listed([Listed("a", Model("llama")), Listed("b", Model("phi-4"))], 5)

    def stream(self, authority: str = "", port: int = 9002) -> Envoy:
        stream = FakeStream(authority, port)
        handler = open_pooled(self, PATH, (), stream)
        assert handler is not None
        return Envoy(handler, stream)

    def served(self) -> list[int]:
        """Returns how many requests each pool has in flight."""
        return [sum(each.inflight) for each in self.pairs]


def completion(model: str = "m", **more: Any) -> bytes:
    return json.dumps({"prompt": "hello", "model": model, **more}).encode()


def named(envoy: Envoy, pool: str, *, last: bool = False) -> list[Any]:
    """Sends headers for which the gateway names the pool."""
    request = pb.ProcessingRequest()
    for name, value in ((":method", "POST"), (":path", "/v1/completions")):
        request.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    request.request_headers.end_of_stream = last
    request.metadata_context.filter_metadata["envoy.lb"].update({KEY: pool})
    return envoy.say(request)


@pytest.mark.parametrize(("authority", "port", "pool"), [("", 9102, 0), ("b.svc", 9102, 0), ("A.svc:9002", 9002, 0), ("b.svc", 9002, 1)])
def test_port_and_authority_decide_before_the_request_does(authority: str, port: int, pool: int) -> None:
    worker = Worker()
    envoy = worker.stream(authority, port)
    assert not isinstance(envoy.handler.request_phase, PooledRequestPhase)
    named(envoy, "d")
    assert set_headers(envoy.body(completion("café"))[0])[DESTINATION]
    assert worker.served() == [int(at == pool) for at in range(4)]


def test_metadata_of_the_gateway_decide_before_the_model_does() -> None:
    worker = Worker()
    envoy = worker.stream()
    assert named(envoy, "d") == []
    answers = envoy.body(completion("m"))
    assert set_headers(answers[0])[DESTINATION] == worker.pairs[3].app.pool.candidates(None).endpoint(3).address
    assert worker.served() == [0, 0, 0, 1]
    without_body = worker.stream()
    assert set_headers(named(without_body, "c", last=True)[0])[DESTINATION]
    assert worker.served() == [0, 0, 1, 1]


@pytest.mark.parametrize(("model", "pool"), [("phi-4", 1), ("m", 1), ("café", 2)])
@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("long", [False, True])
def test_the_model_in_the_body_decides_and_the_body_passes_unchanged(model: str, pool: int, zipped: bool, long: bool) -> None:
    worker = Worker(pair(waiting=(5, 5, 0), body_bytes_max=4 * LONG_BODY))
    for each in worker.pairs:
        each.app.guards.body_bytes_max = 4 * LONG_BODY
    envoy = worker.stream()
    body = completion(model, suffix=random.Random(1).randbytes(LONG_BODY if long else 1).hex())
    sent = gzip.compress(body) if zipped else body
    assert envoy.headers(**({"content-encoding": "gzip"} if zipped else {})) == []
    assert envoy.body(sent[:10], last=False) == []
    answers = envoy.body(sent[10:])
    turns = worker.pairs[0].turns
    while turns or worker.pairs[pool].turns:
        (turns or worker.pairs[pool].turns).popleft()()
        answers += envoy.answers()
    assert set_headers(answers[0])[DESTINATION] == worker.pairs[pool].app.pool.candidates(None).endpoint(pool).address
    assert bodies(answers)[0] == sent
    assert worker.served() == [int(at == pool) for at in range(4)]
    envoy.response_headers()
    envoy.response_body(b"{}")
    assert worker.served() == [0, 0, 0, 0]
    assert envoy.stream.held == 0 and not any(each.faults for each in worker.pairs)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (completion("llama"), "no pool serves the model 'llama'; pools: a, b, c, d"),
        (b'{"prompt": "x"}', "no pool serves a request that names no model; pools: a, b, c, d"),
        (b"not json", "no pool serves a request that names no model; pools: a, b, c, d"),
    ],
)
def test_a_request_of_no_pool_gets_404_which_names_the_pools_there_are(body: bytes, why: str) -> None:
    worker = Worker()
    envoy = worker.stream("unknown.svc")
    envoy.headers()
    status, error, _ = refusal(envoy.body(body))
    assert (status, error["message"]) == (404, f"inference error: NotFound - {why}")
    assert envoy.stream.ended == (0, "")
    assert worker.served() == [0, 0, 0, 0]


def test_a_pool_in_metadata_that_does_not_exist_gets_404() -> None:
    envoy = Worker().stream()
    status, error, _ = refusal(named(envoy, "none"))
    assert (status, error["message"]) == (404, "inference error: NotFound - there is no pool 'none'; pools: a, b, c, d")


def test_the_list_of_models_is_answered_without_an_endpoint() -> None:
    worker = Worker()
    envoy = worker.stream()
    (answer,) = envoy.headers("/v1/models", last=True, **{":method": "GET"})
    assert answer.immediate_response.status.code == 200
    assert [each["id"] for each in json.loads(answer.immediate_response.body)["data"]] == ["llama", "phi-4"]
    assert envoy.stream.ended == (0, "")
    assert worker.served() == [0, 0, 0, 0]


def test_the_list_of_models_is_refused_to_a_client_whom_no_pool_knows() -> None:
    status, _, _ = refusal(Worker().stream().headers("/v1/models", last=True, **{":method": "GET", "x-key": "wrong"}))
    assert status == 401


def test_the_list_of_models_waits_until_the_worker_knows_the_present_configurations() -> None:
    worker = Worker()
    worker.loaded.clear()
    envoy, gone = (worker.stream() for _ in range(2))
    for asking in (envoy, gone):
        assert asking.headers("/v1/models", last=True, **{":method": "GET"}) == []
    gone.handler.closed()
    worker.load(0, 1)
    (answer,) = envoy.answers()
    assert answer.immediate_response.status.code == 200
    assert envoy.stream.ended == (0, "")
    assert gone.answers() == []


def test_where_no_model_decides_on_a_pool_there_is_no_list() -> None:
    worker = Worker()
    worker.choice = PoolChoice([Matched("a", 9102), Matched("b", 9103)])
    status, error, _ = refusal(worker.stream().headers("/v1/models", last=True, **{":method": "GET"}))
    assert status == 404 and error["message"].endswith("pools: a, b")


def test_at_a_port_of_one_pool_an_endpoint_of_this_pool_lists_its_models() -> None:
    worker = Worker()
    assert set_headers(worker.stream("b.svc").headers("/v1/models", last=True, **{":method": "GET"})[0])[DESTINATION]


def test_another_request_without_a_body_gets_404() -> None:
    status, error, _ = refusal(Worker().stream().headers("/v1/files", last=True))
    assert (status, "names no model" in error["message"]) == (404, True)


@pytest.mark.parametrize(("model", "key", "status"), [("m", "wrong", 0), ("café", "right", 0), ("café", "wrong", 401)])
def test_the_tenants_of_the_chosen_pool_count_and_its_hidden_headers(model: str, key: str, status: int) -> None:
    third = pair(waiting=(5, 5, 0))
    keys, _ = parse(f"acme {hashed('right')}")
    third.app.tenants = Tenants([FromKey("authorization", False, keys)])
    third.app.guards.hidden_headers = third.app.tenants.hidden(())
    envoy = Worker(third).stream()
    assert envoy.headers(authorization=key) == []
    answers = envoy.body(completion(model))
    if status:
        assert refusal(answers)[0] == status
        return
    removed = answers[0].request_headers.response.header_mutation.remove_headers
    assert ("authorization" in removed) is (model == "café")


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_a_client_that_leaves_at_any_time_leaves_nothing_behind(sent: int) -> None:
    waits = Waits()
    worker = Worker(pair(waits, waiting=(5, 5, 0)))
    envoy = worker.stream()
    steps = [lambda: envoy.headers(), lambda: envoy.body(completion("café"))]
    for step in steps[:sent]:
        step()
    envoy.handler.closed()
    assert worker.served() == [0, 0, 0, 0]
    assert not envoy.handler.request_phase.open and not any(each.faults for each in worker.pairs)


def test_another_method_than_ext_proc_has_no_handler() -> None:
    assert open_pooled(Worker(), "/grpc.health.v1.Health/Check", (), FakeStream()) is None


@pytest.mark.parametrize("first", ["port", "metadata", "model"])
def test_a_request_of_a_pool_that_is_not_loaded_waits_until_it_is(first: str) -> None:
    worker = Worker()
    worker.loaded = {1}
    pool = {"port": 0, "metadata": 3, "model": 2}[first]
    envoy = worker.stream(port=9102 if first == "port" else 9002)
    assert (named(envoy, "d") if first == "metadata" else envoy.headers()) == []
    assert envoy.body(completion("café")) == [] and worker.served() == [0, 0, 0, 0]
    worker.load(pool)
    assert set_headers(envoy.answers()[0])[DESTINATION] == worker.pairs[pool].app.pool.candidates(None).endpoint(pool).address
    assert worker.served() == [int(at == pool) for at in range(4)]


def test_a_request_without_a_body_waits_for_its_pool_too() -> None:
    worker = Worker()
    worker.loaded = {0}
    envoy = worker.stream()
    assert named(envoy, "c", last=True) == []
    worker.load(2)
    assert set_headers(envoy.answers()[0])[DESTINATION]
    assert worker.served() == [0, 0, 1, 0]


def test_a_pool_that_cannot_be_loaded_refuses_its_requests() -> None:
    worker = Worker()
    worker.loaded = {0}
    envoy = worker.stream()
    envoy.headers()
    envoy.body(completion("m"))
    worker.unusable = True
    worker.load()
    status, error, _ = refusal(envoy.answers())
    assert (status, "cannot be loaded" in error["message"]) == (500, True)


def test_a_client_that_leaves_before_the_pool_is_loaded_leaves_nothing_behind() -> None:
    worker = Worker()
    worker.loaded = {0}
    envoy = worker.stream()
    envoy.headers()
    envoy.body(completion("m"))
    envoy.handler.closed()
    worker.load(1)
    assert worker.served() == [0, 0, 0, 0] and envoy.answers() == []


@pytest.mark.parametrize(("first", "name"), [("port", " by pool 'a'"), ("metadata", " by pool 'd'"), ("model", "")])
def test_a_body_that_is_given_up_names_its_pool_as_soon_as_it_is_known(first: str, name: str) -> None:
    worker = Worker()
    worker.loaded = {1}
    envoy = worker.stream(port=9102 if first == "port" else 9002)
    if first == "metadata":
        named(envoy, "d")
    else:
        envoy.headers()
    envoy.body(b"x" * 1000, last=False)
    assert envoy.handler.pool == {"port": 0, "metadata": 3, "model": UNDECIDED}[first]
    envoy.handler.give_up_body()
    status, error, _ = refusal(envoy.answers())
    assert (status, error["message"].partition("held already")[2]) == (429, name)


@pytest.mark.parametrize("loaded", [True, False])
def test_a_compressed_body_is_decompressed_once_and_held_once_however_its_pool_is_found(loaded: bool) -> None:
    def held(authority: str) -> tuple[int, Envoy]:
        waits = Waits()
        worker = Worker()
        worker.pairs[1] = pair(waits, waiting=(5, 0))
        if not loaded:
            worker.loaded = {0}
        envoy = worker.stream(authority)
        envoy.headers(**{"content-encoding": "gzip"})
        envoy.body(gzip.compress(completion("m", suffix=random.Random(1).randbytes(300_000).hex())))
        while worker.pairs[0].turns or worker.pairs[1].turns:
            (worker.pairs[0].turns or worker.pairs[1].turns).popleft()()
        worker.load(1)
        while worker.pairs[1].turns:
            worker.pairs[1].turns.popleft()()
        count = envoy.stream.held
        waits.future.callback(None)
        assert set_headers(envoy.answers()[0])[DESTINATION] and envoy.stream.held == 0
        return count, envoy

    (by_authority, _), (by_model, envoy) = held("b.svc"), held("")
    assert isinstance(envoy.handler.request_phase, PooledRequestPhase)
    assert by_model == by_authority > 600_000
