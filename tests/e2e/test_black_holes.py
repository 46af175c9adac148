"""Model servers that fail every request at once, while their metrics are good, behind a real Envoy."""

import asyncio
import itertools
import json
import re
from collections import Counter

import pytest

from loadtest.demo.children import python
from tests.e2e.cluster import COMPLETIONS, Answer, Cluster, Fleet, Picker, ask, ask_all, completion, eventually, run
from tests.e2e.conftest import FAST

SERVERS = 4
REQUESTS, SECONDS = 120, 6.0
SHARE_MAX = 0.3
RETURNS_S = 60.0  # the longest back-off is 30 s
TOO_LONG = 10**9  # tokens that no server can generate
STATUSES = {"404": 404, "429": 429, "400": 400, "empty answers": 200}  # cause -> status of the order; 200 has no body


def order(fleet: Fleet, server: int, kind: str, **fields: object) -> None:
    body = json.dumps({"kind": kind, "server": server, **fields}).encode()
    assert ask(fleet.addresses[0][1], "/sim/fault", body).status == 200


def traffic(port: int, name: str, *, bad: int = 0) -> list[Answer]:
    """Sends requests at an even rate. `bad`: one of so many asks for more tokens than any server can generate; 0: none."""
    bodies = [completion(f"{name} {n}", max_tokens=TOO_LONG if bad and n % bad == 0 else 20) for n in range(REQUESTS)]
    return asyncio.run(ask_all(port, COMPLETIONS, bodies, SECONDS))


def lines(picker: Picker, event: str) -> list[dict[str, str]]:
    found = [json.loads(line) for line in picker.child.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in found if line["event"] == event]


def failing(picker: Picker) -> list[str]:
    """The causes for which the metrics page names endpoints as ejected."""
    return re.findall(r'^llm_d_epp_endpoint_failing_share\{.*cause="([^"]+)".*\} 1\.0$', picker.page(), re.MULTILINE)


@pytest.mark.parametrize("cause", STATUSES)
def test_a_server_that_fails_every_request_at_once_loses_its_traffic_and_is_named(cluster: Cluster, cause: str) -> None:
    fleet = cluster.fleet(SERVERS, *FAST)
    picker = cluster.picker(fleet.file, workers=2)
    port = cluster.envoy(picker)
    before = Counter(answer.server for answer in traffic(port, "before"))
    assert max(before.values()) < 0.5 * REQUESTS
    order(fleet, 1, "error", status=STATUSES[cause])
    answers = traffic(port, "after")
    late = Counter(answer.server for answer in answers[REQUESTS // 2 :])
    bad = ask(fleet.addresses[1][1], "/sim/stats", None, method="GET").json()["server"]
    assert late[bad] <= SHARE_MAX * REQUESTS / 2
    assert eventually(lambda: len(lines(picker, "endpoint ejected")) > 0)
    ejected = lines(picker, "endpoint ejected")[0]
    host, number = fleet.addresses[1]
    assert (ejected["address"], ejected["cause"]) == (f"{host}:{number}", cause)
    assert "of its last" in ejected["why"]

    def named() -> bool:
        """Whether metrics and doctor name it now. While it is on trial, one request may tell that it works."""
        ask(port, COMPLETIONS, completion("one more", max_tokens=1))
        flags = (f"--metrics-port={picker.metrics}", f"--run-dir={cluster.directory / 'run'}", "--json")
        found = json.loads(run(python("workers", "doctor", *flags)).stdout or "{}").get("findings", [])
        of_ejection = [each for each in found if each["rule"] == "endpoints-ejected"]
        return failing(picker) == [cause] and any(f"(most: {cause})" in each["evidence"] for each in of_ejection)

    assert eventually(named)
    order(fleet, 1, "none")
    prompts = itertools.count()

    def returned() -> bool:
        """Sends one more request, whose prompt no server knows, and asks whether the server is in use again."""
        answer = ask(port, COMPLETIONS, completion(f"{next(prompts)} and now?", max_tokens=1))
        return answer.status == 200 and picker.counter("ejected_endpoints") == 0

    assert eventually(returned, RETURNS_S)


def test_a_client_whose_requests_fail_everywhere_ejects_no_server(cluster: Cluster) -> None:
    fleet = cluster.fleet(SERVERS, *FAST)
    picker = cluster.picker(fleet.file, workers=2)
    port = cluster.envoy(picker)
    answers = traffic(port, "some of them bad", bad=2)
    assert Counter(answer.status for answer in answers) == {200: REQUESTS // 2, 400: REQUESTS // 2}
    assert picker.counter("endpoint_ejections_total") == 0
