"""Runs in virtual time: waits in the picker, endpoints that come and go, facts of headers."""

import numpy as np
import pytest
from msgspec.structs import replace

from epp.config.load import load
from loadtest.replay.fleet import Fleet
from loadtest.replay.reading import Asked, Lifetime
from loadtest.replay.run import FAILED, REFUSED, Replay, Run, headers_of, prompt_text, request_of, world
from loadtest.replay.servers import UNBOUNDED, Speed
from loadtest.replay.services import ReplayServices
from tests.loadtest.replay.recordings import RANDOM, asked, lifetime
from workers.cli.offline import OfflineError, worker_services

SPEED = Speed("steps", 0.001, 1e-4, 0.01, 0.0, 8192, UNBOUNDED, UNBOUNDED, 0, 0.0)
FLOW = """\
featureGates: [flowControl]
plugins:
- {type: concurrency-detector, parameters: {maxConcurrency: 1}}
- {type: random-picker}
schedulingProfiles:
- {name: default, plugins: [{pluginRef: random-picker}]}
flowControl:
  saturationDetector: {pluginRef: concurrency-detector}
"""
SHEDDING = FLOW.replace("featureGates: [flowControl]\n", "")
PREFIX = """\
plugins:
- {type: prefix-cache-scorer}
schedulingProfiles:
- {name: default, plugins: [{pluginRef: prefix-cache-scorer, weight: 1}]}
"""


def replayed(text: str | None, requests: list[Asked], endpoints: list[Lifetime], speed: Speed = SPEED, clients: int = 0) -> Run:
    made = world(requests, endpoints, [speed] * len(endpoints), open=not clients, clients=clients)
    return Replay(load(text, "test"), made).run()


def test_requests_wait_in_queues_in_the_order_of_their_priority() -> None:
    requests = [asked(0.001 * number, number, priority=number % 2) for number in range(6)]
    run = replayed(FLOW, requests, [lifetime(0)])
    assert (run.target == 0).all()
    waited = run.waited_s
    assert waited[0] == 0 and waited[1:].min() > 0
    started = run.at + waited
    assert started[[1, 3, 5]].max() < started[[2, 4]].min()


def test_a_request_leaves_the_queue_when_its_time_is_over() -> None:
    requests = [asked(0.0, 1, output=1000), asked(0.01, 2, ttl_s=0.5)]
    run = replayed(FLOW, requests, [lifetime(0)])
    assert run.target.tolist() == [0, REFUSED]
    assert run.waited_s[1] == pytest.approx(0.5, abs=0.02)
    assert sum(run.refused.values()) == 1


def test_without_flow_control_a_full_pool_sheds_requests_below_priority_zero() -> None:
    requests = [asked(0.0, 1), asked(0.001, 2, priority=-1), asked(0.002, 3)]
    run = replayed(SHEDDING, requests, [lifetime(0)])
    assert run.target.tolist() == [0, REFUSED, 0] and run.refused == {"shed": 1}


def test_an_endpoint_that_joins_later_gets_no_earlier_request() -> None:
    requests = [asked(float(at), at) for at in range(1, 41)]
    run = replayed(RANDOM, requests, [lifetime(0), lifetime(1, joined=20.5)])
    assert (run.target[:20] == 0).all() and (run.target[20:] == 1).any()


def test_an_endpoint_that_leaves_gets_no_later_request_and_finishes_what_it_has() -> None:
    requests = [asked(float(at), at) for at in range(1, 41)]
    run = replayed(RANDOM, requests, [lifetime(0), lifetime(1, left=20.01)])
    assert (run.target[20:] == 0).all() and (run.target >= 0).all()
    assert not np.isnan(run.lasted_s).any()


def test_a_server_that_goes_down_fails_its_requests_and_comes_back_without_its_cache() -> None:
    requests = [asked(1.0, 1, 2, output=1000), asked(5.0, 1, 2), asked(9.0, 1, 2)]
    run = replayed(PREFIX, requests, [lifetime(0, down=((2.0, 4.0),))])
    assert run.target.tolist() == [FAILED, 0, 0]
    assert run.cached.tolist()[1:] == [0, 127]


def test_prompts_of_one_conversation_go_to_the_server_that_has_them() -> None:
    requests = [asked(float(at), *range(100 * (at % 4), 100 * (at % 4) + 8)) for at in range(1, 41)]
    run = replayed(PREFIX, requests, [lifetime(0), lifetime(1)])
    assert run.cached[8:].min() > 0
    assert all(len(set(run.target[np.arange(start, 40, 4)].tolist())) == 1 for start in range(4))


def test_what_servers_held_before_the_recording_attracts_its_first_requests() -> None:
    requests = [asked(float(at), *range(100 * at, 100 * at + 8), held=((at % 2, 8),)) for at in range(1, 21)]
    run = replayed(PREFIX, requests, [lifetime(0), lifetime(1)])
    assert run.target.tolist() == [at % 2 for at in range(1, 21)]
    assert (run.cached == 8 * 64 - 1).all()


def test_caches_are_warm_also_under_a_configuration_that_does_not_look_at_prefixes() -> None:
    run = replayed(RANDOM, [asked(1.0, 1, 2, held=((0, 2),))], [lifetime(0)])
    assert run.cached.tolist() == [127]


def test_the_built_in_configuration_replays() -> None:
    requests = [asked(0.05 * at, at % 7, 100 + at, flow=at % 3) for at in range(80)]
    run = replayed(None, requests, [lifetime(0), lifetime(1)])
    assert (run.target >= 0).all() and not np.isnan(run.first_s).any()


def test_the_learned_latency_model_replays_and_learns_which_server_is_slow() -> None:
    learned = """\
plugins: [{type: learned-latency-producer}, {type: learned-latency-scorer}]
schedulingProfiles: [{name: default, plugins: [{pluginRef: learned-latency-scorer, weight: 1}]}]
"""
    requests = [asked(0.1 * at, *range(1000 * at, 1000 * at + 20)) for at in range(400)]
    made = world(requests, [lifetime(0), lifetime(1)], [SPEED, replace(SPEED, prefill_s=1e-3)], open=True, clients=0)
    run = Replay(load(learned, "test"), made).run()
    assert (run.target[200:] == 0).mean() > 0.7


def test_clients_wait_for_slower_answers() -> None:
    requests = [asked(0.2 * at, at, lasted=0.15) for at in range(20)]
    fast = replayed(RANDOM, requests, [lifetime(0)], clients=1)
    slow = replayed(RANDOM, requests, [lifetime(0)], replace(SPEED, decode_s=0.1), clients=1)
    assert slow.at[-1] > 4 * fast.at[-1]
    assert slow.first_s.max() < 0.2  # nobody waits for another client


def test_an_answer_that_is_not_streamed_comes_as_a_whole() -> None:
    run = replayed(RANDOM, [asked(0.0, 1, output=50, streaming=False), asked(5.0, 2, output=50)], [lifetime(0)])
    assert run.first_s[0] == pytest.approx(run.lasted_s[0]) and run.first_s[1] < run.lasted_s[1] / 5


def test_equal_seeds_give_equal_runs() -> None:
    requests = [asked(0.05 * at, at % 7, 100 + at) for at in range(60)]
    one, two = (replayed(RANDOM, requests, [lifetime(0), lifetime(1)]) for _ in range(2))
    assert one.target.tolist() == two.target.tolist()


def test_a_plugin_that_asks_another_server_is_named() -> None:
    config = load(PREFIX, "test")
    services = worker_services(config, Fleet([lifetime(0)], [SPEED]), ReplayServices)
    plugin = config.pipeline.plugins["prefix-cache-scorer"]
    with pytest.raises(OfflineError, match=r"'prefix-cache-scorer' asks another server \(GET http://b\)"):
        services.of(plugin).http("GET", "http://b", timeout_s=1.0)


def test_headers_carry_the_hashes_of_their_values() -> None:
    facts = asked(0.0, 1, headers=("x-session", "x-tier"), facts=(0xAB, 0))
    assert headers_of(facts) == {"x-session": f"{0xAB:016x}"}
    assert request_of(facts, 1, 0.0).headers == headers_of(facts)


def test_texts_are_equal_exactly_where_hashes_are() -> None:
    one, two = prompt_text(asked(0.0, 1, 2, 3), 1), prompt_text(asked(0.0, 1, 2, 4), 2)
    assert len(one) == len(two) == 3 * 256
    assert one[:512] == two[:512] and one[512:] != two[512:]
    longer = asked(0.0, 1, prompt_tokens=100)
    assert len(prompt_text(longer, 1)) == 400 and prompt_text(longer, 1)[256:] != prompt_text(longer, 2)[256:]
