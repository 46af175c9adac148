"""An attacker with a tenant of its own, who wants to know which of two prompts another tenant has sent.

The attacker chooses all prompts, sends both of them afterwards, may ask for cached prompts only, and sees everything that an answer has,
and also which server each request went to. It learns in half of the tries what gives the victim away, and guesses in the other half.
"""

import random
from collections import Counter, defaultdict
from typing import Any

import pytest

from epp.config.load import load
from epp.request.tenants import FromHeader, Salts, Tenants
from tests.fakes import FakePool, FakeServices, candidates
from tests.pair import Pair, set_headers
from tests.workers.worker.extproc.test_untrusted_headers import send_headers

SERVERS = 4
TRIES = 400
BLOCKS = 8
KNOWN = 0.95  # of the guesses are right if nothing keeps tenants apart
CHANCE = 0.62  # 0.5, and more than three standard deviations of 200 guesses
CONFIG = """\
plugins:
- {type: approx-prefix-cache-producer, parameters: {blockSizeTokens: 64}}
- {type: prefix-cache-scorer}
- {type: no-hit-lru-scorer}
- {type: queue-scorer}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: prefix-cache-scorer, weight: 3}
  - {pluginRef: no-hit-lru-scorer, weight: 1}
  - {pluginRef: queue-scorer, weight: 1}
"""
LEARNED = """\
plugins: [{type: learned-latency-producer}, {type: learned-latency-scorer}]
schedulingProfiles: [{name: default, plugins: [{pluginRef: learned-latency-scorer}]}]
"""


def pool_of(text: str, salts: Salts | None) -> Pair:
    pipeline = load(text, "test").pipeline
    pipeline.start(FakeServices())
    names = [column.name for column in pipeline.columns if column.type is not frozenset]
    p = Pair(pipeline, FakePool(candidates({name: [0.0] * SERVERS for name in names}, count=SERVERS)))
    p.app.tenants = tenants = Tenants([FromHeader("x-tenant")], salts=salts)
    p.app.guards.hidden_headers = tenants.hidden(())
    return p


def sees(p: Pair, tenant: str, prompt: str, *more: tuple[str, bytes]) -> Any:
    """Sends a request to its end. Returns what shows: status, size and headers of the picker's answer, and the server."""
    envoy = p.open()
    body = b'{"model":"m","prompt":"%b","max_tokens":1}' % prompt.encode()
    sent = [*send_headers(envoy, [("x-tenant", tenant.encode()), *more], "/v1/completions"), *envoy.body(body)]
    p.clock.now += 0.01
    if sent[0].HasField("immediate_response"):
        return sent[0].immediate_response.status.code
    envoy.response_headers()
    envoy.response_body(b'{"usage":{"prompt_tokens":500,"completion_tokens":1}}')
    envoy.handler.closed()
    headers = set_headers(sent[0])
    return headers.get("x-gateway-destination-endpoint"), sorted(headers)


def attack(p: Pair, attacker: str = "bee") -> float:
    """Returns the share of right guesses."""
    rng = random.Random(1)
    learned: dict[Any, Counter[int]] = defaultdict(Counter)
    right = 0
    for number in range(TRIES):
        prompts = [f"{number}-{which} " + "word " * (64 * BLOCKS) for which in range(2)]
        secret = rng.randrange(2)
        sees(p, "acme", prompts[secret])
        asked = [sees(p, attacker, prompt, ("prefer", b"if-available")) for prompt in prompts]
        served = [sees(p, attacker, prompt) for prompt in prompts]
        seen = repr((asked, served[0] == served[1])), repr(asked)
        if number < TRIES // 2:
            for each in seen:
                learned[each][secret] += 1
        else:
            best = max((learned[each] for each in seen), key=lambda counts: abs(counts[0] - counts[1]))
            right += (best[1] > best[0]) == secret
    return right / (TRIES - TRIES // 2)


@pytest.mark.parametrize("text", [CONFIG, LEARNED], ids=["prefix", "learned"])
def test_salts_keep_what_a_tenant_has_sent_from_others(text: str) -> None:
    assert attack(pool_of(text, None)) > KNOWN  # the attack works
    assert 1 - CHANCE < attack(pool_of(text, Salts(7))) < CHANCE


def test_tenants_of_one_group_do_not_hide_what_they_have_sent() -> None:
    assert attack(pool_of(CONFIG, Salts(7, {"acme": "company", "bee": "company"}))) > KNOWN
