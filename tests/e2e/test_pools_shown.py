"""What commands show of a real picker of several pools, with simulated servers and Envoy."""

import json
import re
import subprocess
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loadtest.demo.children import python
from loadtest.demo.stack import get
from tests.e2e.cluster import Cluster, ask, eventually, run
from tests.e2e.pools_site import NAMES, Site


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Cluster() as cluster:
        yield Site(cluster)


def test_top_has_a_row_for_each_pool_and_the_pool_of_each_endpoint(site: Site) -> None:
    shown = site.json("top", "--once", "--interval=100ms")
    assert [(pool["name"], pool["fresh"], pool["endpoints"]) for pool in shown["pools"]] == [(name, 2, 2) for name in NAMES]
    assert {(each["pool"], each["address"]) for each in shown["endpoints"]} == {(n, a) for n, mine in site.addresses.items() for a in mine}
    table = site.run("top", "--once", "--interval=100ms").stdout.splitlines()
    (title,) = [at for at, line in enumerate(table) if line.split()[:2] == ["pool", "fresh"]]
    assert [line.split()[:2] for line in table[title + 1 : title + 4]] == [[name, "2/2"] for name in NAMES]


def test_top_shows_one_pool_only_if_it_is_named(site: Site) -> None:
    shown = site.json("top", "--once", "--interval=100ms", "--pool=small")
    assert [pool["name"] for pool in shown["pools"]] == ["small"]
    assert {each["address"] for each in shown["endpoints"]} == set(site.addresses["small"])


def test_the_list_of_models_has_what_the_endpoints_of_patterns_have(site: Site) -> None:
    def listed() -> dict[str, tuple[str, str]]:
        data = ask(site.port, "/v1/models", None, method="GET").json()["data"]
        return {each["id"]: (each["owned_by"], each.get("root", "")) for each in data}

    # `idle-1` leads to no pool: the name in the file is `idle`.
    wanted = {"big-1": ("big", "big-1"), "small-1": ("small", "small-1"), "idle": ("idle", "")}
    assert eventually(lambda: listed() == wanted), listed()


def test_explain_names_the_pool_of_a_decision_and_shows_only_those_of_a_pool(site: Site) -> None:
    decisions = site.json("explain", "--n=50")["decisions"]
    assert {(each["pool"], each["model"]) for each in decisions} == {("big", "big-1"), ("small", "small-1")}
    assert {each["pool"] for each in site.json("explain", "--n=50", "--pool=small")["decisions"]} == {"small"}
    assert "pool big  model big-1" in site.run("explain", "--request-id=big-2").stdout
    nothing = site.run("explain", "--pool=idle")
    assert nothing.returncode == 1 and "no decision was made yet in pool idle" in nothing.stderr


@pytest.mark.parametrize("command", [("top", "--once"), ("explain",), ("doctor",)], ids=lambda each: each[0])
def test_a_pool_that_does_not_exist_is_refused_with_those_that_do(site: Site, command: tuple[str, ...]) -> None:
    done = site.run(*command, "--pool=huge")
    assert done.returncode != 0
    assert "there is no pool 'huge'; pools: big, small, idle" in done.stderr


def test_metrics_of_requests_have_the_pool_and_those_of_no_pool_an_empty_one(site: Site) -> None:
    page = site.picker.page()
    counted = {
        match[2]: float(match[3])
        for match in re.finditer(r'^llm_d_epp_request_(total|error_total)\{.*pool="(.*?)".*\} (\S+)$', page, re.MULTILINE)
    }
    assert counted == {"big": 6, "small": 3, "": 1}


def test_a_healthy_picker_of_several_pools_has_no_finding(site: Site) -> None:
    last: list[Any] = []

    def silent() -> bool:
        last[:] = json.loads(site.run("doctor", f"--gateway-config={site.gateway}", "--json").stdout)["findings"]
        return not last

    assert eventually(silent), last


def test_the_state_has_each_pool_with_its_flow_control_and_its_configuration(site: Site) -> None:
    state = json.loads(get(site.picker.metrics, "/debug/state") or b"{}")
    assert {name: pool["endpoints"] for name, pool in state["pools"].items()} == dict.fromkeys(NAMES, 2)
    assert [name for name, pool in state["pools"].items() if "flow_control" in pool] == ["big", "idle"]
    assert "flow_control" not in state
    assert sorted(each["pools"] for each in state["settings"]["configurations"]) == [["big", "idle"], ["small"]]


def test_the_page_has_the_history_and_the_times_to_the_first_token_of_each_pool(site: Site) -> None:
    def figures(pool: str) -> dict[str, list[float | None]]:
        return json.loads(get(site.picker.metrics, f"/debug/state/history?pool={pool}") or b"{}")["figures"]

    def seen(pool: str, figure: str) -> bool:
        return any(value for value in figures(pool)[figure])

    assert site.ask("small-1") == 200
    assert eventually(lambda: seen("small", "first_token_p50_s") and seen("small", "requests_per_s"), 20.0), figures("small")
    assert not seen("idle", "requests_per_s") and not seen("idle", "first_token_p50_s")
    assert get(site.picker.metrics, "/debug/state/history?pool=huge") is None


EACH = 30  # requests of a pool in a recording


def exported(folder: Path, *flags: str) -> list[dict[str, Any]]:
    done = run(python("workers", "record", "export", str(folder), "--jsonl=-", *flags))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def recorded(site: Site, folder: Path, *flags: str) -> None:
    """Records while requests come for two pools."""

    def record() -> subprocess.CompletedProcess[str]:
        return run(python("workers", "record", "start", *site.where, "--seconds=4", f"--folder={folder}", *flags))

    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(record)
        assert eventually(lambda: folder.is_dir() and any(folder.iterdir()))
        for _ in range(EACH):
            assert site.ask("big-1") == 200 and site.ask("small-1") == 200
        assert done.result().returncode == 0, done.result().stderr


def test_a_recording_of_all_pools_names_the_pool_of_each_request_and_is_replayed_for_one(site: Site, tmp_path: Path) -> None:
    recorded(site, tmp_path / "all")
    rows = exported(tmp_path / "all")
    assert Counter(row["pool"] for row in rows) == {"big": EACH, "small": EACH}
    for row in rows:
        assert row["address"] in site.addresses[row["pool"]] and len(row["candidates"]) == 2
    assert [row["pool"] for row in exported(tmp_path / "all", "--pool=small")] == ["small"] * EACH
    refused = run(python("workers", "record", "replay", str(tmp_path / "all")))
    assert refused.returncode == 1 and "give one with --pool; pools: big, small, idle" in refused.stderr
    replayed = run(python("workers", "record", "replay", str(tmp_path / "all"), "--pool=small", "--json"))
    assert replayed.returncode == 0, replayed.stderr
    shown = json.loads(replayed.stdout)
    assert shown["base"]["requests"] == EACH and set(shown["servers"]) == {row["endpoint"] for row in rows if row["pool"] == "small"}


def test_a_recording_of_one_pool_has_nothing_of_the_others(site: Site, tmp_path: Path) -> None:
    recorded(site, tmp_path / "one", "--pool=small")
    assert Counter(row["pool"] for row in exported(tmp_path / "one")) == {"small": EACH}
    unknown = run(python("workers", "record", "start", *site.where, "--seconds=1", f"--folder={tmp_path / 'none'}", "--pool=huge"))
    assert unknown.returncode != 0 and "there is no pool 'huge'; pools: big, small, idle" in unknown.stderr
    assert not (tmp_path / "none").exists()


def test_decisions_that_workers_do_not_remember_are_found_in_the_small_recording_with_their_pool(site: Site) -> None:
    request_id = str(uuid.uuid4())
    assert site.ask("small-1", request_id) == 200
    for _ in range(70):  # more than two workers remember
        site.ask("big-1")
    assert eventually(lambda: site.run("explain", f"--request-id={request_id}").returncode == 0)
    assert "pool small" in site.run("explain", f"--request-id={request_id}", "--pool=small").stdout
    assert site.run("explain", f"--request-id={request_id}", "--pool=big").returncode == 1


# The last test: it ends servers.


def test_the_doctor_names_the_pool_whose_servers_are_down(site: Site) -> None:
    site.fleets["big"].child.process.kill()

    def found(*flags: str) -> list[tuple[str, str, str]]:
        every = json.loads(site.run("doctor", "--json", *flags).stdout)["findings"]
        return [(each["rule"], each["title"], each["pool"]) for each in every if each["rule"] == "endpoints-down"]

    assert eventually(lambda: found() == [("endpoints-down", "Pool big: 2 endpoints refuse connections", "big")]), found()
    assert found("--pool=big") and not found("--pool=small")
