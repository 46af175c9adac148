"""Two pickers of one pool: one leads by a Lease, the other one stands by with the same table. Also: access to a picker's metrics."""

import os
import signal
import time

from tests.deploy.cases import CASES
from tests.deploy.renderers import ours
from tests.e2e.cluster import Picker
from tests.kube.reloading import events, reload, started
from tests.kube.world import ACCOUNT, World, page, until

LEASE_S = 15.0  # the leader's promise
SLACK_S = 8.0  # for the next read of the lease, and for a busy machine
RENEWED_S = 3.0  # the leader renews the lease every 2 s
ROLES = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
FLAG = "--ha-enable-leader-election"
REVIEWS = (("authentication.k8s.io", "tokenreviews", ("create",)), ("authorization.k8s.io", "subjectaccessreviews", ("create",)))


def killed(picker: Picker, world: World) -> None:
    """Kills all processes of a picker, as if its node were gone."""
    os.killpg(picker.child.pid, signal.SIGKILL)
    picker.child.process.wait(10)
    world.cluster.forget(picker.child)


def pair(world: World) -> tuple[Picker, Picker]:
    """Starts a leader and a standby."""
    world.pool()
    world.pod("one", "127.70.0.1")
    token = world.token()
    first = world.picker(FLAG, token=token, environ={"POD_NAME": "picker-5d9c7b8f6d-first"})
    second = world.picker(FLAG, token=token, ready=False, environ={"POD_NAME": "picker-5d9c7b8f6d-other"})
    return first, second


def test_killing_the_leader_moves_readiness_within_the_lease_time(world: World) -> None:
    first, second = pair(world)
    table = world.table(second)
    world.converged(table)
    world.refuses(second, "lead")
    world.pod("two", "127.70.0.2")
    world.converged(table), "the standby keeps its table up to date"
    began = time.monotonic()
    killed(first, world)
    until(second.ready, "the other one leads", LEASE_S + SLACK_S)
    print(f"readiness moved {time.monotonic() - began:.1f} s after the leader was killed")
    world.pod("three", "127.70.0.3")
    world.converged(table)


def test_a_leader_that_stops_hands_over_at_once(world: World) -> None:
    first, second = pair(world)
    world.refuses(second, "lead")
    began = time.monotonic()
    first.child.signal(signal.SIGTERM)
    until(second.ready, "the other one leads", LEASE_S)
    print(f"readiness moved {time.monotonic() - began:.1f} s after SIGTERM to the leader")
    assert first.child.process.wait(20) == 0
    world.cluster.forget(first.child)


def test_only_users_with_access_by_the_api_server_can_read_metrics(world: World) -> None:
    world.pool()
    allow_everywhere(world, ACCOUNT, REVIEWS)
    allow_everywhere(world, "prometheus", non_resources=("/metrics",))
    reader = world.kube.token(world.space, "prometheus")
    stranger = world.kube.token(world.space, "stranger")
    picker = world.picker("--metrics-endpoint-auth=true")

    def status(token: str) -> int:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return page(picker.metrics, "/metrics", headers)[0]

    assert (status(""), status("made-up"), status(stranger), status(reader)) == (401, 401, 403, 200)
    assert page(picker.metrics, "/readyz")[0] == 200, "probes need no token"


def test_the_manifests_grant_exactly_the_rights_that_the_picker_uses(world: World) -> None:
    """With leader election, metrics and a reload: no request is refused, and no right is granted without use."""
    granted = set()
    for one in ours(CASES["leader election"], pool="pool", namespace=world.space):
        if one["kind"] in ROLES:
            world.kube.apply(one)
            rules = one.get("rules", ())
            granted |= {(what, verb) for rule in rules for what in rule["resources"] for verb in rule["verbs"]}
    allow_everywhere(world, "prometheus", non_resources=("/metrics",))
    reader = world.kube.token(world.space, "prometheus")
    world.pool()
    world.pod("one", "127.71.0.1")
    since = world.plane.audited()
    token = world.kube.token(world.space, "pool-epp")
    leader = {"POD_NAME": "picker-5d9c7b8f6d-first"}
    picker, config = started(world, FLAG, "--metrics-endpoint-auth=true", token=token, environ=leader)
    world.converged(world.table(picker))
    reload(picker, config)
    assert page(picker.metrics, "/metrics", {"authorization": f"Bearer {reader}"})[0] == 200
    time.sleep(RENEWED_S)
    until(lambda: events(world), "an event about the reload")
    requests = [one for one in world.plane.requests(since) if one.user == world.user("pool-epp")]
    assert [one for one in requests if one.code == 403] == []
    assert granted == {(one.resource, one.verb) for one in requests}


def allow_everywhere(world: World, account: str, rules: tuple = (), non_resources: tuple[str, ...] = ()) -> None:
    """Creates a ClusterRole with these rules and binds it to a service account of the world's namespace."""
    name, api = f"{world.space}-{account}", "rbac.authorization.k8s.io"
    granted = [{"apiGroups": [group], "resources": [what], "verbs": list(verbs)} for group, what, verbs in rules]
    if non_resources:
        granted.append({"nonResourceURLs": list(non_resources), "verbs": ["get"]})
    version, meta = f"{api}/v1", {"name": name}
    world.kube.apply({"apiVersion": version, "kind": "ClusterRole", "metadata": meta, "rules": granted})
    subject = {"kind": "ServiceAccount", "name": account, "namespace": world.space}
    ref = {"apiGroup": api, "kind": "ClusterRole", "name": name}
    bound = {"apiVersion": version, "kind": "ClusterRoleBinding", "metadata": meta, "roleRef": ref, "subjects": [subject]}
    world.kube.apply(bound)
