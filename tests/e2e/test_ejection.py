"""A model server that dies, and one that answers errors, behind a real Envoy."""

import json
import signal

from epp.decision.explain import NOT_DOWN
from loadtest.demo.children import python
from tests.e2e.cluster import ANSWER_S, COMPLETIONS, Cluster, ask, completion, eventually, run, write_endpoints
from tests.e2e.conftest import FAST

SERVERS = 8
ERRORS_MAX = 2
ERRORS_UNTIL_EJECTED = 12  # 5 in a row, and one for each trial while the test runs


def test_one_dead_server_of_8_costs_at_most_2_errors(cluster: Cluster) -> None:
    fleets = cluster.fleets(SERVERS, *FAST)
    file = write_endpoints(cluster.directory / "all.yaml", [fleet.addresses[0] for fleet in fleets])
    picker = cluster.picker(file, workers=2)
    port = cluster.envoy(picker)
    assert [ask(port, COMPLETIONS, completion(f"{n} a", max_tokens=1)).status for n in range(40)] == [200] * 40
    assert picker.page().count("llm_d_epp_ejected_endpoints") > 0
    dead = fleets[3].child
    dead.signal(signal.SIGKILL)
    dead.process.wait()
    cluster.forget(dead)
    statuses = [ask(port, COMPLETIONS, completion(f"{n} b", max_tokens=1)).status for n in range(150)]
    assert sum(status != 200 for status in statuses) <= ERRORS_MAX


def test_a_server_that_answers_errors_alone_is_ejected_and_top_and_explain_show_it(cluster: Cluster) -> None:
    """Its metrics stay good."""
    fleet = cluster.fleet(4, *FAST)
    picker = cluster.picker(fleet.file, workers=2)
    port = cluster.envoy(picker)
    order = json.dumps({"kind": "error", "server": 1}).encode()
    assert ask(fleet.addresses[0][1], "/sim/fault", order).status == 200
    statuses = [ask(port, COMPLETIONS, completion(f"{n} a", max_tokens=1)).status for n in range(80)]
    errors = sum(status != 200 for status in statuses)
    assert 1 <= errors <= ERRORS_UNTIL_EJECTED, errors
    assert eventually(lambda: picker.counter("endpoint_ejections_total") >= 1)
    host, bad = fleet.addresses[1]

    def shown() -> bool:
        """Sends one more request. Returns whether `epp top` and `epp explain` show that the bad endpoint is left out.

        This may take several requests: while a trial is under way, the worker that makes it still considers the endpoint.
        """
        ask(port, COMPLETIONS, completion("and now?", max_tokens=1))
        flags = (f"--metrics-port={picker.metrics}", f"--run-dir={cluster.directory / 'run'}")
        top = json.loads(run(python("workers", "top", *flags, "--once", "--json", "--interval=100ms")).stdout)
        states = {endpoint["address"]: endpoint["state"] for endpoint in top["endpoints"]}
        url = f"--url=http://127.0.0.1:{picker.metrics}"
        (last,) = json.loads(run(python("workers", "explain", url, "--last", "--json")).stdout)["decisions"]
        (profile,) = last["profiles"]
        left_out = [step for step in profile["filters"] if step["filter"] == NOT_DOWN]
        return states[f"{host}:{bad}"] in ("ejected", "on trial") and [step["dropped"] for step in left_out] == [1]

    assert eventually(shown, ANSWER_S)


def test_errors_of_1_in_100_requests_eject_none(cluster: Cluster) -> None:
    picker = cluster.picker(cluster.fleet(4, *FAST).file, workers=2)
    port = cluster.envoy(picker)
    faults = [{"x-sim-fault": "error"} if n % 100 == 7 else {} for n in range(400)]
    statuses = [ask(port, COMPLETIONS, completion(f"{n} a", max_tokens=1), fault).status for n, fault in enumerate(faults)]
    assert sum(status != 200 for status in statuses) == 4
    assert picker.counter("endpoint_ejections_total") == 0
