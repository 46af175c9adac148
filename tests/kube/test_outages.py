"""Known endpoints stay known: while the API server is away, after it has lost its history, and while definitions or rights are missing."""

import os
import signal
import time

import pytest

from loadtest.demo.children import descendants
from tests.kube.client import Refused
from tests.kube.objects import DEFINITIONS, LEGACY, NEW, POOLS, READ, install, objective, pod, status, uninstall
from tests.kube.relay import Relay
from tests.kube.table import Watched
from tests.kube.world import World, supervisor_of, until, warnings

PODS = 20
LOG_S = 15.0
OTHERS = ("inferenceobjectives", "inferencemodelrewrites")


def test_endpoints_outlive_a_killed_api_server_and_a_compacted_history(world: World, outage_s: float) -> None:
    world.pool()
    for number in range(PODS):
        world.pod(f"pod-{number}", f"127.40.0.{number + 1}")
    picker = world.picker()
    table = world.table(picker)
    world.converged(table)
    version = world.kube.request("GET", f"/api/v1/namespaces/{world.space}/pods")["metadata"]["resourceVersion"]
    with Watched(table) as watched:
        world.plane.kill()
        ends = time.monotonic() + outage_s
        assert picker.ready()
        beside, child = world.plane.second()
        for number in range(5):
            beside.delete(pod(world.space, f"pod-{number}"), 0)
        beside.patch(beside.create(pod(world.space, "new")), status("127.40.1.1"), status=True)
        time.sleep(max(0.0, ends - time.monotonic()))
        assert picker.ready(), "the picker knows its endpoints, so it is ready"
        assert watched.changes == []
        world.plane.compact()
        world.plane.end(child)
        since = world.plane.audited()
        world.plane.restart()
        took = world.converged(table, time.monotonic())
        print(f"converged {1000 * took:.0f} ms after the API server was ready again, having been away for {outage_s:.0f} s and more")
        assert {row.name for _, row in watched.left()} == {f"pod-{number}-rank-0" for number in range(5)}
        assert {row.name for _, row in watched.appeared()} == {"new-rank-0"}
    path = f"/api/v1/namespaces/{world.space}/pods?watch=1&timeoutSeconds=1&resourceVersion={version}"
    try:
        answer = str(world.kube.request("GET", path))
    except Refused as refused:
        answer = str(refused)
    assert "too old" in answer, f"the history should be gone, but: {answer}"

    def verbs() -> set[str]:
        return {one.verb for one in world.plane.requests(since) if one.user == world.user() and "/pods" in one.uri}

    until(lambda: verbs() == {"list", "watch"}, "a list, then a watch")


def test_endpoints_stay_if_the_supervisor_is_killed_while_the_api_is_away(world: World) -> None:
    relay = Relay("127.0.0.1", world.plane.port)
    world.pool()
    for number in range(PODS):
        world.pod(f"pod-{number}", f"127.41.0.{number + 1}")
    picker = world.picker(port=relay.port)
    table = world.table(picker)
    world.converged(table)
    rows = table.look()
    with Watched(table) as watched:
        relay.leave()
        killed = supervisor_of(picker.child.pid)
        os.kill(killed, signal.SIGKILL)
        until(lambda: killed not in descendants(picker.child.pid), "it is gone")
        until(picker.ready, "its successor knows the endpoints")
        time.sleep(1.0)
        assert table.look() == rows
        world.kube.delete(pod(world.space, "pod-0"), 0)
        relay.come_back()
        took = world.converged(table)
        print(f"converged {1000 * took:.0f} ms after the API was back")
        assert [row.name for _, row in watched.left()] == ["pod-0-rank-0"]
        assert watched.appeared() == []
    assert table.look() < rows, "the other endpoints keep their slots"


def test_a_picker_that_starts_while_the_api_is_away_waits_for_it_and_can_be_stopped(world: World) -> None:
    relay = Relay("127.0.0.1", world.plane.port)
    relay.leave()
    world.pool()
    world.pod("one", "127.46.0.1")
    first, second = (world.picker(port=relay.port, ready=False) for _ in range(2))
    for picker in (first, second):
        world.refuses(picker, "yet", f"127.0.0.1:{relay.port}")
    begun = time.monotonic()
    first.child.signal(signal.SIGTERM)
    assert first.child.process.wait(10) == 0
    print(f"ended {time.monotonic() - begun:.1f} s after SIGTERM, without an API server")
    world.cluster.forget(first.child)
    relay.come_back()
    world.cluster.wait(second.child, second.ready)
    world.converged(world.table(second))


def test_a_picker_becomes_ready_after_the_definitions_are_installed(world: World) -> None:
    uninstall(world.kube)
    try:
        world.pod("early", "127.42.0.1")
        picker = world.picker(ready=False)
        world.refuses(picker, "InferencePool", "CRD")
        install(world.kube)
        world.pool()
        begun = time.monotonic()
        world.cluster.wait(picker.child, picker.ready)
        print(f"ready {time.monotonic() - begun:.1f} s after the definition was installed")
        world.converged(world.table(picker))
    finally:
        install(world.kube, DEFINITIONS)


@pytest.mark.parametrize("missing", ["pods", "inferencepools"])
@pytest.mark.parametrize("verb", ["list", "watch"])
def test_a_verb_that_the_role_lacks_is_reported_and_the_picker_works_after_it_is_added(world: World, missing: str, verb: str) -> None:
    world.pool()
    world.pod("one", "127.43.0.1")
    groups = {"pods": "", "inferencepools": POOLS}
    rules = [
        (group, what, tuple(v for v in READ if (what, v) != (missing, verb)))
        for group, what in (*((g, p) for p, g in groups.items()), *((g, o) for g in (NEW, LEGACY) for o in OTHERS))
    ]
    picker = world.picker(ready=False, token=world.token(rules))
    named = f'resources: ["{missing}"], verbs: ["{verb}"]'
    until(lambda: any(named in event for event in warnings(picker)), f"the log has {named}", LOG_S)
    if verb == "list":
        world.refuses(picker, named)
    world.token()
    world.cluster.wait(picker.child, picker.ready)
    table = world.table(picker)
    world.pod("two", "127.43.0.2")
    world.converged(table)


def test_a_picker_without_the_right_to_read_objects_still_serves(world: World) -> None:
    world.pool()
    world.pod("one", "127.44.0.1")
    world.kube.create(objective(world.space, "high", 10))
    rules = [("", "pods", READ), (POOLS, "inferencepools", READ)]
    picker = world.picker(token=world.token(rules))
    world.converged(world.table(picker))
    named = 'resources: ["inferenceobjectives"], verbs: ["list"]'
    until(lambda: any(named in event for event in warnings(picker)), f"the log has {named}", LOG_S)
