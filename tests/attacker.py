"""An attacker with a tenant of its own, who wants to know which of two requests another tenant, the victim, has sent.

The attacker chooses both requests. In each try, the victim sends one of them, by lot, and the attacker sends both: before the victim,
while the victim's request runs, or afterwards, and may ask for cached prompts only. It sees everything that its answers have, and which
server each request went to, also that of the victim: in reality the attacker would have to infer that one from load.

The attacker learns from one half of the tries what gives the victim away, and guesses in the other half; then the halves change roles.
So it never guesses a try that it has learned from, and a rate above chance is a leak, not luck in the choice of a rule.
"""

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from epp.candidates import Candidates
from epp.config.load import load
from epp.plugin import Hashes, HeldView
from epp.prefix.streams import WEIGHT_ONE
from epp.protocol.codec import DESTINATION
from epp.request import Subset
from epp.request.tenants import FromHeader, Salts, Tenants
from tests.fakes import FakeHeld, FakePool, FakeServices, candidates
from tests.pair import Envoy, Pair, set_headers
from tests.workers.worker.extproc.test_untrusted_headers import send_headers

ATTACKER, VICTIM = "bee", "acme"
WORDS: Final = "word " * 512  # makes a prompt long enough for some blocks
SIGMAS: Final = 1.96  # of a normal distribution: 95 %
WHEN: Final = ("before", "during", "after")
EQUAL: Final = 1e-9
NO_HEADERS: Final[Mapping[str, str]] = {}
Features = dict[str, str]


class Message(NamedTuple):
    """A request that a client may send."""

    fields: Mapping[str, Any]
    headers: Mapping[str, str] = NO_HEADERS
    path: str = "/v1/completions"

    @property
    def body(self) -> bytes:
        return json.dumps({"model": "m", "max_tokens": 1, **self.fields}).encode()


class Kind(NamedTuple):
    """What differs between the two requests, and the plugins that could give it away. `message`: by the number of the try, and secret."""

    plugins: str
    message: Callable[[int, int], Message]
    servers: int = 4


def text(number: int, secret: int) -> Message:
    return Message({"prompt": f"{number}-{secret} {WORDS}"})


def tokens(number: int, secret: int) -> Message:
    return Message({"prompt": [number, secret, *range(300, 700)]})


def session(number: int, secret: int) -> Message:
    return Message({"prompt": f"{number} {WORDS}"}, {"x-session-id": f"{number}-{secret}"})


def image(number: int, secret: int) -> Message:
    """A generation of vLLM's own API, in which media have hashes."""
    media = {"mm_hashes": {"image": [f"{number}-{secret}"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 9}]}}
    return Message({"token_ids": [7] * 10, "features": media, "sampling_params": {"max_tokens": 1}}, path="/inference/v1/generate")


SESSION: Final = "session"
PREFIX: Final = "{type: approx-prefix-cache-producer, parameters: {blockSizeTokens: 64}}, {type: prefix-cache-scorer}, {type: queue-scorer}"
KINDS: Final[Mapping[str, Kind]] = {
    "prefix": Kind(f"{PREFIX}, {{type: no-hit-lru-scorer}}", text),
    "learned": Kind("{type: learned-latency-producer}, {type: learned-latency-scorer}", text),
    "rendezvous": Kind(f"{PREFIX}, {{type: prefix-rendezvous-scorer}}", text, servers=8),
    "precise": Kind(
        "{type: token-producer}, {type: precise-prefix-cache-producer, parameters: {speculativeIndexing: true}}, {type: queue-scorer},"
        " {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}}",
        tokens,
    ),
    "media": Kind("{type: token-producer}, {type: mm-embeddings-cache-producer}, {type: mm-embeddings-cache-scorer}", image),
    SESSION: Kind("{type: session-affinity-scorer, parameters: {strategy: session_id}}, {type: queue-scorer}", session),
}
CONDITION: Final = {"prefer": "if-available"}


class Held(FakeHeld):
    """Holds what each endpoint was sent, as if its KV events came at once."""

    def __init__(self, servers: int) -> None:
        super().__init__()
        followed = np.ones(servers, dtype=bool)
        self.view_ = HeldView((16,), followed, followed, (16,) * servers, ("",) * servers, frozenset())
        self.rows: Mapping[int, int] = {}  # by owner

    def expect(self, hashes: Hashes, owner: int, block_tokens: int) -> None:
        self.by_row.setdefault(self.rows[owner], {}).update(dict.fromkeys(hashes.tolist(), WEIGHT_ONE))


class Loaded(FakePool):
    """A pool that knows which requests are in flight. `pair`: must be set."""

    def __init__(self, names: Sequence[str], servers: int) -> None:
        super().__init__(candidates({name: [0.0] * servers for name in names}, count=servers))
        self.pair: Pair

    def candidates(self, subset: Subset | None) -> Candidates:
        inflight = np.array(self.pair.inflight[: len(self.fixed)], dtype=np.float64)
        self.fixed = Candidates(self.fixed.snapshot, inflight, np.zeros(len(inflight)))
        return super().candidates(subset)


def picker(kind: Kind, salts: Salts | None) -> Pair:
    """Makes a picker that knows the tenants of requests."""
    plugins = f"plugins: [{kind.plugins}]"
    pipeline = load(plugins, "test", allow_experimental=True).pipeline
    services = FakeServices()
    services.held_blocks = held = Held(kind.servers)
    pipeline.start(services)
    pool = Loaded([column.name for column in pipeline.columns if column.type is not frozenset], kind.servers)
    held.rows = pool.fixed.snapshot.endpoint_list.row_of_owner
    p = pool.pair = Pair(pipeline, pool)
    p.app.tenants = tenants = Tenants([FromHeader("x-tenant")], salts=salts)
    p.app.guards.hidden_headers = tenants.hidden(())
    return p


class Shown(NamedTuple):
    """What a client sees of a request. `server`: its address; "" if the picker refuses the request."""

    answer: str
    server: str


class Client:
    """Sends requests of one tenant."""

    def __init__(self, p: Pair, tenant: str) -> None:
        self._pair = p
        self._tenant = tenant

    def begin(self, message: Message, more: Mapping[str, str] = NO_HEADERS) -> tuple[Envoy, Shown]:
        """Sends a request until it is on its way to its server, or refused."""
        envoy = self._pair.open()
        given = {"x-tenant": self._tenant, **message.headers, **more}
        sent = send_headers(envoy, [(name, value.encode()) for name, value in given.items()], message.path) + envoy.body(message.body)
        self._pair.clock.now += 0.01
        if sent[0].HasField("immediate_response"):
            return envoy, Shown(f"{sent[0].immediate_response.status.code}", "")
        headers = dict(set_headers(sent[0]))
        server, made_up = headers.pop(DESTINATION), headers.pop("x-request-id")
        size = sum(each.ByteSize() for each in sent) - len(made_up)
        return envoy, Shown(f"{sorted(headers.items())} {size}", server)

    def end(self, envoy: Envoy, shown: Shown) -> Shown:
        """Lets the server answer."""
        if not shown.server:
            return shown
        answers = envoy.response_headers() + envoy.response_body(b'{"usage":{"prompt_tokens":500,"completion_tokens":1}}')
        envoy.handler.closed()
        return shown._replace(answer=f"{shown.answer} {[each.SerializeToString() for each in answers]}")

    def send(self, message: Message, more: Mapping[str, str] = NO_HEADERS) -> Shown:
        return self.end(*self.begin(message, more))


def tried(attacker: Client, victim: Client, kind: Kind, number: int, secret: int, when: str) -> Features:
    """Makes one try. Returns what the attacker sees of it."""
    both = [kind.message(number, which) for which in range(2)]
    before = [attacker.send(message).server for message in both] if when == "before" else []
    envoy, hers = victim.begin(both[secret])
    if when != "during":
        victim.end(envoy, hers)
    asked = [attacker.send(message, CONDITION) for message in both]
    served = [attacker.send(message) for message in both]
    if when == "during":
        victim.end(envoy, hers)
    seen: dict[str, object] = {}
    for which in range(2):
        seen[f"asked {which}"] = bool(asked[which].server), asked[which].server == hers.server
        seen[f"served {which}"] = served[which].answer
        seen[f"server {which}"] = served[which].server == hers.server
        seen[f"moved {which}"] = before and before[which] == served[which].server
    seen["both asked"] = [each.answer for each in asked], asked[0].server == asked[1].server
    seen["both served"] = served[0].answer == served[1].answer, served[0].server == served[1].server
    return {f"{when}: {name}": repr(value) for name, value in seen.items()}


def plan(tries: int, rng: random.Random) -> list[tuple[str, int]]:
    """Returns when the attacker sends, and the victim's secret, of each try. Each combination is as frequent in each half.

    Otherwise the attacker would learn from nothing which secret is more frequent, and be right, or wrong, in many tries at once: with 300
    tries by lot, the rate would be between 0.42 and 0.58 without any leak, and sometimes 0.62.
    """
    cases = list(itertools.product(WHEN, range(2)))
    halves = [list(itertools.islice(itertools.cycle(cases), tries // 2)) for _ in range(2)]
    for half in halves:
        rng.shuffle(half)
    return [*halves[0], *halves[1]]


def attack(p: Pair, kind: Kind, tries: int, attacker: str = ATTACKER, seed: int = 1) -> float:
    """Returns how many of `tries` guesses are right. `tries`: a multiple of 12."""
    clients = Client(p, attacker), Client(p, VICTIM)
    planned = enumerate(plan(tries, random.Random(seed)))
    return guessed([(tried(*clients, kind, number, secret, when), secret) for number, (when, secret) in planned])


def guessed(made: Sequence[tuple[Features, int]]) -> float:
    """Learns from each half of the tries, and guesses in the other. Returns how many guesses are right. `made`: what is seen; secret."""
    middle = len(made) // 2
    return _right(made[:middle], made[middle:]) + _right(made[middle:], made[:middle])


def _right(known: Sequence[tuple[Features, int]], unknown: Sequence[tuple[Features, int]]) -> float:
    """Guesses by the likelihoods of all features, as if they were independent of each other. Without evidence, half a guess is right."""
    counts = Counter((name, value, secret) for seen, secret in known for name, value in seen.items())
    right = 0.0
    for seen, secret in unknown:
        evidence = sum(math.log((counts[(*each, 1)] + 0.5) / (counts[(*each, 0)] + 0.5)) for each in seen.items())
        right += 0.5 if abs(evidence) < EQUAL else (evidence > 0) == secret
    return right


def interval(right: float, tries: int) -> tuple[float, float]:
    """Returns Wilson's 95 % confidence interval of the rate."""
    rate, z = right / tries, SIGMAS * SIGMAS / tries
    centre, spread = rate + z / 2, SIGMAS * math.sqrt(rate * (1 - rate) / tries + z / 4 / tries)
    return (centre - spread) / (1 + z), (centre + spread) / (1 + z)
