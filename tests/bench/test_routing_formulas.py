"""Published formulas against states whose result was computed by hand.

A *state* is one row: the tokens of the prompt, the numbers of a server, and its cost; or of several servers, and who may be chosen.
"""

import pytest

from epp.config.load import load
from epp.data import KV_USAGE, WAITING
from epp.decision.decide import choose
from tests.bench.routing_formulas import dual_map, dynamo, lbgr, least_load, least_requests, lmetric, smetric, token_aware
from tests.bench.routing_ledger import Formula, Prompt, Server
from tests.bench.routing_zoo import FIELD_TEXT
from tests.cases import cases
from tests.fakes import FakePool, FakeServices, candidates, request


def cheapest(formula: Formula, prompt: Prompt, servers: list[Server]) -> set[int]:
    costs = formula(prompt, servers)
    return {at for at, cost in enumerate(costs) if cost == min(costs)}


@cases(
    ("waiting", "kv", "blocks", "totals"),  # one value per server; blocks of the four of the prompt
    [
        ([7], [0.3], [2], [2 + 1.4 + 1.5]),
        ([0, 0], [0, 0], [0, 0], [2 + 2, 2 + 2]),
        ([0, 10], [0, 0], [0, 0], [2 + 2, 0 + 2]),
        ([10, 0], [0, 0], [0, 0], [0 + 2, 2 + 2]),
        ([0, 0], [0.5, 0], [0, 0], [2 + 1, 2 + 2]),
        ([0, 0], [0, 0], [4, 0], [4 + 3, 4]),
        ([0, 0], [0, 0], [2, 0], [4 + 1.5, 4]),
        ([0, 0], [0, 0], [1, 3], [4 + 0.75, 4 + 2.25]),
        ([0, 10], [0, 0], [0, 4], [2 + 2, 0 + 2 + 3]),
        ([0, 10], [0, 0.5], [0, 4], [2 + 2, 0 + 1 + 3]),
        ([0, 10], [0, 0.75], [0, 4], [2 + 2, 0 + 0.5 + 3]),
        ([0, 5, 10], [0, 0, 0], [0, 0, 0], [2 + 2, 1 + 2, 0 + 2]),
        ([0, 5, 10], [0, 0, 0], [0, 2, 4], [2 + 2, 1 + 2 + 1.5, 0 + 2 + 3]),
        ([5, 5, 10], [0, 0, 0], [0, 0, 0], [2 + 2, 2 + 2, 0 + 2]),
        ([2, 4, 6], [0.2, 0.4, 0.6], [0, 0, 0], [2 + 1.6, 1 + 1.2, 0 + 0.8]),
        ([2, 4, 6], [0.2, 0.4, 0.6], [0, 0, 4], [2 + 1.6, 1 + 1.2, 0 + 0.8 + 3]),
        ([100, 0], [1, 0], [4, 0], [0 + 0 + 3, 2 + 2]),
        ([1, 0], [0, 0], [4, 0], [0 + 2 + 3, 2 + 2]),
        ([0, 0, 0], [0.9, 0.1, 0.5], [4, 4, 4], [2 + 0.2 + 3, 2 + 1.8 + 3, 2 + 1 + 3]),
        ([3, 3], [0.25, 0.25], [1, 1], [2 + 1.5 + 0.75, 2 + 1.5 + 0.75]),
        ([0, 8, 4], [0.5, 0, 0.25], [3, 2, 1], [2 + 1 + 2.25, 0 + 2 + 1.5, 1 + 1.5 + 0.75]),
    ],
)
def test_fields_weights(waiting: list[float], kv: list[float], blocks: list[int], totals: list[float]) -> None:
    services = FakeServices()
    services.match = lambda hashes: {at + 1: held for at, held in enumerate(blocks) if held}  # type: ignore[method-assign]
    pipeline = load(FIELD_TEXT, "test").pipeline
    pipeline.start(services)
    pool = FakePool(candidates({WAITING.name: waiting, KV_USAGE.name: kv}))
    try:
        choose(pipeline, request(bytes(4 * 64 * 4)), pool).send(None)
    except StopIteration as done:
        assert done.value.runs["default"].totals.tolist() == pytest.approx(totals, abs=0.02)
    else:
        raise AssertionError("nothing in this configuration waits")


@cases(
    ("inflight", "chosen"),
    [
        ([0], {0}),
        ([7], {0}),
        ([0, 0], {0, 1}),
        ([0, 1], {0}),
        ([1, 0], {1}),
        ([1, 1], {0, 1}),
        ([2, 1], {1}),
        ([3, 9], {0}),
        ([100, 99], {1}),
        ([0, 0, 0], {0, 1, 2}),
        ([0, 0, 1], {0, 1}),
        ([1, 0, 0], {1, 2}),
        ([0, 1, 0], {0, 2}),
        ([3, 2, 1], {2}),
        ([1, 2, 3], {0}),
        ([2, 1, 2], {1}),
        ([5, 5, 4], {2}),
        ([5, 4, 4], {1, 2}),
        ([8, 7, 6, 5], {3}),
        ([5, 8, 5, 8], {0, 2}),
        ([256, 0, 256, 1], {1}),
    ],
)
def test_least_requests(inflight: list[int], chosen: set[int]) -> None:
    assert cheapest(least_requests, Prompt(100), [Server(inflight=count) for count in inflight]) == chosen


@cases(
    ("tokens", "servers", "chosen"),  # a server: hit, pending
    [
        (100, [(0, 0)], {0}),
        (100, [(0, 0), (0, 10)], {0}),
        (100, [(0, 10), (0, 0)], {1}),
        (100, [(0, 5), (0, 5)], {0, 1}),
        (100, [(80, 50), (0, 0)], {0}),  # 80 % are enough
        (100, [(79, 10), (0, 0)], {0}),  # 31, 100
        (100, [(79, 90), (0, 0)], {1}),  # 111, 100
        (100, [(80, 1_000), (100, 2_000)], {0}),  # 1020, 2001
        (100, [(80, 100), (100, 90)], {1}),  # 120, 91
        (100, [(80, 100), (90, 110)], {0, 1}),  # 120, 120
        (100, [(100, 286_704), (0, 0)], {0}),  # 18 s more, not above
        (100, [(100, 286_705), (0, 0)], {1}),
        (100, [(100, 286_705), (0, 1)], {0}),
        (100, [(100, 286_705), (90, 5), (0, 0)], {1}),  # the best of those that hold it is near
        (100, [(100, 5), (80, 5), (0, 0)], {0}),  # 6, 25
        (1_000, [(800, 0), (0, 0), (0, 0)], {0}),
        (1_000, [(799, 0), (0, 0)], {0}),  # 201, 1000
        (1_000, [(799, 900), (0, 0)], {1}),  # 1101, 1000
        (1_000, [(1_000, 300_000), (1_000, 290_000), (0, 0)], {2}),
        (1_000, [(1_000, 300_000), (1_000, 290_000), (0, 3_296)], {1}),
        (1_000, [(1_000, 50), (1_000, 50), (1_000, 60)], {0, 1}),
        (5, [(4, 0), (0, 0)], {0}),
    ],
)
def test_token_aware(tokens: int, servers: list[tuple[int, int]], chosen: set[int]) -> None:
    assert cheapest(token_aware, Prompt(tokens), [Server(hit=hit, pending=ahead) for hit, ahead in servers]) == chosen


@cases(
    ("tokens", "hit", "pending", "held", "inflight", "usual", "agentic"),
    [
        (16, 0, 0, 0, 0, 1, 4),
        (160, 0, 0, 0, 0, 10, 40),
        (160, 160, 0, 0, 0, 0, 0),
        (160, 80, 0, 0, 0, 5, 0),
        (160, 64, 0, 0, 0, 6, 8),
        (160, 0, 160, 0, 0, 20, 80),
        (160, 80, 160, 0, 1, 15, 40 + 64),
        (160, 160, 160, 160, 1, 10 + 10, 10 + 64),
        (160, 0, 0, 320, 2, 10 + 20, 40 + 20 + 128),
        (1_600, 1_600, 0, 1_600, 1, 100, 100 + 64),
        (1_600, 800, 800, 1_600, 2, 100 + 100, 200 + 100 + 128),
        (1_600, 0, 3_200, 3_200, 3, 300 + 200, 1_200 + 200 + 192),
        (8, 0, 0, 0, 0, 0.5, 2),
        (24, 16, 0, 0, 0, 0.5, 0),
        (32, 16, 16, 48, 1, 2 + 3, 4 + 3 + 64),
        (4_096, 4_080, 0, 4_096, 1, 1 + 256, 256 + 64),
        (4_096, 0, 4_096, 8_192, 2, 512 + 512, 2_048 + 512 + 128),
        (4_096, 2_048, 0, 0, 0, 128, 0),
        (4_096, 1_024, 1_024, 4_096, 4, 256 + 256, 768 + 256 + 256),
        (100, 0, 60, 40, 1, 10 + 2.5, 40 + 2.5 + 64),
        (48, 48, 320, 640, 10, 20 + 40, 68 + 40 + 640),
    ],
)
def test_dynamo(tokens: int, hit: int, pending: int, held: int, inflight: int, usual: float, agentic: float) -> None:
    server = Server(hit=hit, pending=pending, held=held, inflight=inflight)
    assert dynamo(1.0, 1.0, 0.0)(Prompt(tokens), [server]) == [usual]
    assert dynamo(2.0, 4.0, 64.0)(Prompt(tokens), [server]) == [agentic]


@cases(
    ("queued", "since", "rate", "kv", "cost"),
    [
        (0, 0, 10_000, 0.0, 0.0),
        (1_000, 0, 10_000, 0.0, 0.1),
        (0, 1_000, 10_000, 0.0, 0.1),
        (500, 1_500, 10_000, 0.0, 0.2),
        (0, 0, 10_000, 0.5, 0.15),
        (0, 0, 10_000, 0.75, 0.45),
        (0, 0, 10_000, 0.9, 1.35),
        (0, 0, 10_000, 0.95, 2.85),
        (0, 0, 10_000, 0.99, 14.85),
        (0, 0, 10_000, 1.0, 14.85),  # the penalty stays finite
        (1_000, 0, 5_000, 0.0, 0.2),
        (1_000, 0, 20_000, 0.0, 0.05),
        (1_000, 1_000, 2_000, 0.5, 1.15),
        (12_000, 8_000, 4_000, 0.0, 5.0),
        (12_000, 8_000, 4_000, 0.8, 5.6),
        (0, 0, 1, 0.2, 0.0375),
        (1, 0, 1, 0.2, 1.0375),
        (300, 700, 1_000, 0.6, 1.225),
        (0, 64, 128, 0.25, 0.55),
        (2_048, 0, 1_024, 0.4, 2.1),
        (90, 110, 10_000, 0.1, 0.02 + 0.15 / 9),
    ],
)
def test_least_load(queued: int, since: int, rate: float, kv: float, cost: float) -> None:
    server = Server(queued=queued, since=since, rate=rate, kv=kv)
    assert least_load(Prompt(100), [server]) == pytest.approx([cost])


@cases(
    ("tokens", "hit", "inflight", "cost"),
    [
        (100, 0, 0, 100),
        (100, 0, 1, 200),
        (100, 100, 0, 1),
        (100, 100, 9, 10),
        (100, 96, 4, 20),
        (1_000, 0, 7, 8_000),
        (1_000, 992, 7, 64),
        (1, 0, 0, 1),
        (1, 0, 3, 4),
        (16, 16, 0, 1),
        (17, 16, 1, 2),
        (4_096, 0, 2, 12_288),
        (4_096, 4_000, 2, 288),
        (4_096, 4_096, 99, 100),
        (500, 250, 3, 1_000),
        (500, 480, 11, 240),
        (12_000, 11_200, 5, 4_800),
        (12_000, 0, 0, 12_000),
        (64, 32, 63, 2_048),
        (7, 0, 10, 77),
        (300, 304, 1, 2),
    ],
)
def test_lmetric(tokens: int, hit: int, inflight: int, cost: int) -> None:
    assert lmetric(Prompt(tokens), [Server(hit=hit, inflight=inflight)]) == [cost]


@cases(
    ("tokens", "servers", "chosen"),  # a server: hit, pending, inflight and, if it is not 10,000, its rate
    [
        (100, [(0, 0, 0), (0, 0, 0)], {0, 1}),
        (100, [(0, 0, 1), (0, 0, 0)], {1}),
        (100, [(0, 0, 1), (0, 0, 2)], {0}),
        (100, [(0, 300, 1), (0, 100, 2)], {0, 1}),  # 400, 400
        (100, [(0, 300, 1), (0, 101, 2)], {0}),
        (100, [(0, 900, 1), (0, 0, 8)], {1}),  # 1000, 800
        (100, [(0, 5_000, 0), (0, 0, 1)], {0}),
        (1_000, [(900, 0, 5), (0, 0, 0)], {0}),  # the objective: 1.0625 s or 10,625 tokens
        (1_000, [(900, 10_525, 5), (0, 0, 0)], {0}),
        (1_000, [(900, 10_526, 5), (0, 0, 0)], {1}),
        (1_000, [(900, 10_526, 5), (0, 9_626, 0)], {0}),  # nobody meets it
        (1_000, [(900, 20_000, 5), (800, 0, 1), (0, 0, 0)], {2}),  # -, 200, 0
        (1_000, [(900, 20_000, 5), (800, 0, 1), (0, 0, 1)], {1}),  # -, 200, 1000
        (1_000, [(900, 0, 9), (900, 500, 0)], {0, 1}),
        (1_000, [(900, 20_000, 9), (900, 500, 0)], {1}),
        (4_000, [(3_000, 11_500, 1), (0, 0, 0)], {0}),  # the objective: 1.25 s or 12,500 tokens
        (4_000, [(3_000, 11_501, 1), (0, 0, 0)], {1}),
        (4_000, [(3_000, 11_501, 1, 20_000), (0, 0, 0)], {0}),
        (4_000, [(3_000, 0, 1, 500), (0, 0, 1)], {1}),  # 2 s
        (4_000, [(3_000, 0, 1, 500), (0, 9_000, 1)], {0}),
        (16_000, [(16_000, 0, 0), (8_000, 0, 0)], {0}),
        (16_000, [(8_000, 12_000, 3), (0, 4_000, 3)], {0}),  # the objective: 2 s
    ],
)
def test_smetric(tokens: int, servers: list[tuple[int, ...]], chosen: set[int]) -> None:
    assert cheapest(smetric, Prompt(tokens), [_server(*numbers) for numbers in servers]) == chosen


def _server(hit: int, pending: int, inflight: int = 0, rate: float = 10_000.0) -> Server:
    return Server(hit=hit, pending=pending, inflight=inflight, rate=rate)


@cases(
    ("one", "other", "chosen"),  # a server: hit, pending and, if it is not 10,000, its rate; the objective: 10,625 tokens
    [
        ((0, 0), (0, 1), 0),
        ((0, 1), (0, 0), 1),
        ((16, 0), (0, 0), 0),
        ((0, 0), (16, 0), 1),
        ((16, 500), (0, 0), 0),
        ((0, 0), (16, 9_000), 1),
        ((16, 9_641), (0, 0), 0),
        ((16, 9_642), (0, 0), 1),
        ((16, 9_642), (0, 9_700), 0),  # 10,626 and 10,700
        ((500, 10_000), (0, 9_000), 0),
        ((500, 10_126), (0, 9_000), 1),
        ((992, 10_617), (16, 0), 0),
        ((992, 10_618), (16, 0), 1),
        ((992, 0, 4), (0, 0), 0),  # 2 s, but less work
        ((992, 2_000, 1_000), (0, 0), 1),
        ((992, 500, 1_000), (0, 0), 0),
        ((480, 100), (480, 99), 1),
        ((480, 99), (480, 100), 0),
        ((480, 20_000), (480, 30_000), 0),
        ((1_000, 0), (992, 0), 0),
        ((992, 0), (1_000, 0), 1),
        ((1_000, 10_625), (0, 0), 1),
    ],
)
def test_dual_map_of_two_servers(one: tuple[int, ...], other: tuple[int, ...], chosen: int) -> None:
    servers = [
        Server(id=at, hit=hit, pending=pending, rate=rest[0] if rest else 10_000.0) for at, (hit, pending, *rest) in enumerate((one, other))
    ]
    assert cheapest(dual_map, Prompt(1_000, key=5), servers) == {chosen}


def test_dual_map_sends_a_prefix_to_two_servers_whatever_the_others_do() -> None:
    for key in range(100):
        chosen = set()
        for busy in range(8):
            servers = [Server(id=at, pending=500 * (at == busy) + at) for at in range(8)]
            chosen |= cheapest(dual_map, Prompt(1_000, key=key), servers)
        assert len(chosen) == 2


@cases(
    ("tokens", "hit", "pending", "bias_s", "cost"),
    [
        (100, 0, 0, 0.0, 0.01),
        (10_000, 0, 0, 0.0, 1.0),
        (10_000, 9_000, 0, 0.0, 0.1),
        (10_000, 10_000, 0, 0.0, 0.0001),
        (1_000, 0, 1_000, 0.0, 0.2),
        (1_000, 500, 500, 0.0, 0.1),
        (1_000, 0, 0, 0.5, 0.6),
        (1_000, 0, 0, -0.05, 0.05),
        (1_000, 1_000, 0, 0.25, 0.2501),
        (500, 0, 4_500, 0.0, 0.5),
        (500, 0, 4_500, 1.0, 1.5),
        (8_000, 7_600, 0, 0.04, 0.08),
        (8_000, 0, 2_000, 0.04, 1.04),
        (1, 0, 0, 0.0, 0.0001),
        (1, 0, 9_999, 0.0, 1.0),
        (2_500, 0, 0, 2.0, 2.25),
        (2_500, 2_400, 400, 2.0, 2.05),
        (16_000, 15_000, 24_000, 0.0, 2.5),
        (16_000, 0, 24_000, -1.0, 3.0),
        (640, 640, 639, 0.01, 0.074),
        (200, 160, 60, 0.09, 0.1),
    ],
)
def test_lbgr(tokens: int, hit: int, pending: int, bias_s: float, cost: float) -> None:
    assert lbgr(Prompt(tokens), [Server(hit=hit, pending=pending, bias_s=bias_s)]) == pytest.approx([cost])
