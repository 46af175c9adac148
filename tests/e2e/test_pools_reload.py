"""Configurations of several pools change one by one, while requests of the others run: through Envoy, with real processes."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from subprocess import CompletedProcess
from typing import Any

import pytest

from loadtest.demo.children import python
from loadtest.demo.ports import free_ports
from loadtest.demo.stack import LOOPBACK
from tests.bench.reload import replace
from tests.e2e.cluster import COMPLETIONS, Answer, Cluster, ask, eventually, run
from tests.e2e.echo import Server, gateway, servers
from tests.e2e.test_warm import child_pid
from workers.host.exit_codes import ExitCode

POOLS = ("one", "two", "three")
PAUSE_S = 0.05  # of a thread between two rounds of requests
QUEUE = "plugins: [{type: queue-scorer}]\n"
CACHE = "plugins: [{type: kv-cache-utilization-scorer}]\n"
FLOW = "featureGates: [flowControl]\n" + QUEUE
ODD = """
plugins: [{type: odd-scorer}, {type: max-score-picker}]
schedulingProfiles: [{name: default, plugins: [{pluginRef: odd-scorer}, {pluginRef: max-score-picker}]}]
"""
PLUGIN = """
import ctypes, os, time
from epp.plugin import Candidates, Profile, Request, Scorer, Scores, plugin
import numpy as np

@plugin("odd-scorer")
class Odd(Scorer):
    def __init__(self, name, params):
        super().__init__(name, params)
        if os.path.exists(os.environ["ODD_SLOW"]):
            time.sleep(3.0)

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        if request.id == "crash":
            ctypes.string_at(0)
        return np.zeros(len(candidates))
"""


class Site:
    """A picker of three pools with servers that tell who they are, and an Envoy. The third pool has its configuration in the pools file."""

    def __init__(self, cluster: Cluster, started: list[Server], monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
        self.folder = cluster.directory
        self.servers = dict(zip((*POOLS, "four"), started, strict=True))
        for name in ("one", "two", "four"):
            (self.folder / f"{name}.yaml").write_text(QUEUE)
        plugins = self.folder / "plugins"
        plugins.mkdir()
        (plugins / "odd.py").write_text(PLUGIN)
        self.slow = self.folder / "slow"
        monkeypatch.setenv("ODD_SLOW", str(self.slow))
        self.picker = cluster.picker(self.folder, f"--plugin-path={plugins}", *flags, workers=2, pools_text=self.text())
        (self.file,) = [file for file in self.folder.glob("config-*.yaml") if "pools:" in file.read_text()]
        self.port = gateway(cluster, self.picker.grpc)
        self.failed: list[Answer] = []
        self.asked = 0

    def text(self, *names: str, inline: str = QUEUE, more: str = "", endpoints: str = "") -> str:
        """Returns a pools file. `names`: all three pools if there are none. `endpoints`: of the third pool; "": its server."""
        texts = []
        for name in names or POOLS:
            address = endpoints if name == "three" and endpoints else f"{LOOPBACK}:{self.servers[name].server_port}"
            config = f"config: |\n    {inline}" if name == "three" else f"configFile: {name}.yaml"
            texts.append(f'- name: {name}\n  models: ["{name}-*"]\n  endpoints: ["{address}"]\n  {config.rstrip()}\n')
        return "pools:\n" + "".join(texts) + more

    def epp(self, *line: str) -> CompletedProcess[str]:
        where = (f"--run-dir={self.folder / 'run'}", f"--metrics-port={self.picker.metrics}")
        return run(python("workers", "config", *line, *where), 60.0)

    def reload(self, *flags: str) -> str:
        """Reloads, and returns what the command says. It must go well."""
        done = self.epp("reload", *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(self, pool: str, prompt: str = "hello", **headers: str) -> Answer:
        body = json.dumps({"model": f"{pool}-1", "prompt": prompt, "max_tokens": 1}).encode()
        return ask(self.port, COMPLETIONS, body, headers)

    def serves(self, pool: str, server: str = "") -> bool:
        answer = self.ask(pool)
        return answer.status == 200 and answer.json()["server"] == self.servers[server or pool].address

    def generation(self, pool: str) -> int:
        (line,) = [
            line for line in self.picker.page().splitlines() if line.startswith("llm_d_epp_config_generation{") and f'"{pool}"' in line
        ]
        return int(float(line.split()[-1]))

    def generations(self) -> list[int]:
        return [self.generation(pool) for pool in POOLS]

    def load(self, stop: threading.Event, *pools: str) -> threading.Thread:
        """Asks for these pools until `stop` is set, and notes answers that are not good."""

        def work() -> None:
            while not stop.wait(PAUSE_S):
                for pool in pools:
                    self.asked += 1
                    answer = self.ask(pool)
                    if answer.status != 200:
                        self.failed.append(answer)

        thread = threading.Thread(target=work)
        thread.start()
        return thread


@pytest.fixture
def site(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with servers(4) as started:
        yield Site(cluster, started, monkeypatch)


def test_a_reload_reloads_the_pools_that_have_changed_and_no_request_of_any_pool_fails(site: Site) -> None:
    stop = threading.Event()
    threads = [site.load(stop, *POOLS) for _ in range(3)]
    try:
        assert eventually(lambda: site.asked > 20)
        assert site.reload() == "unchanged: one, two, three\n"
        for number, text in enumerate((CACHE, FLOW, QUEUE), 2):
            replace(site.folder / "one.yaml", text)
            said = site.reload()
            assert f"one: generation {number} (" in said and "unchanged: two, three" in said
            assert site.generations() == [number, 1, 1]
        replace(site.file, site.text(inline=CACHE))
        assert "three: generation 2 (" in site.reload()
        assert "generation 5 (" in site.reload("--pool", "one")
        asked = site.asked
        assert eventually(lambda: site.asked > asked + 20)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert site.generations() == [5, 1, 2]
    assert site.failed == []


def test_a_bad_configuration_of_one_pool_is_refused_with_its_place_and_changes_nothing_for_the_others(site: Site) -> None:
    replace(site.folder / "one.yaml", "plugins: [{type: no-scorer}]\n")
    replace(site.folder / "two.yaml", CACHE)
    done = site.epp("reload")
    assert done.returncode == ExitCode.CONFIG
    assert f"one: refused: {site.folder}/one.yaml:1:18: error[unknown-type]" in done.stderr
    assert "two: generation 2 (" in done.stderr and "unchanged: three" in done.stderr
    assert site.generations() == [1, 2, 1]
    replace(site.file, site.text(inline="plugins: {}\n"))
    assert f"three: refused: {site.file}:14:10: error[wrong-type]" in site.epp("reload", "--timeout=60s").stderr
    replace(site.file, "pools: [{name: one}, {name: one}]\n")
    done = site.epp("reload")
    assert done.returncode == ExitCode.CONFIG and "error[duplicate-name]" in done.stderr
    assert all(site.serves(pool) for pool in POOLS)


def test_a_candidate_is_tried_promoted_and_rolled_back_for_one_pool(site: Site) -> None:
    assert all(site.serves(pool) for pool in POOLS)
    (site.folder / "candidate.yaml").write_text(CACHE)
    tried = site.epp("try", str(site.folder / "candidate.yaml"), "--share=50%", "--pool=two")
    assert tried.returncode == 0 and tried.stdout.startswith("candidate 2 ("), tried.stderr
    assert all(site.serves(pool) for pool in POOLS * 10)
    page = site.picker.page()
    for side in ("in_force", "candidate"):
        assert f'llm_d_epp_tryout_requests_total{{configuration="{side}",pool="two"}}' in page
    assert 'tryout_requests_total{configuration="candidate",pool="one"}' not in page
    assert site.epp("promote", "--pool=one").returncode == ExitCode.CONFIG
    assert "generation 2 (" in site.epp("promote", "--pool=two").stdout
    assert site.generations() == [1, 2, 1]
    assert "generation 3 (" in site.epp("rollback", "--pool=two").stdout
    assert site.generations() == [1, 3, 1]
    nameless = site.epp("rollback")
    assert nameless.returncode == 2 and "pools: one, two, three" in nameless.stderr
    assert "there is no pool 'none'" in site.epp("reload", "--pool=none").stderr


def test_pools_come_change_and_go_with_the_file(site: Site) -> None:
    assert site.ask("four").status == 404
    replace(site.file, site.text(*POOLS, "four"))
    said = site.reload()
    assert "four: generation 2 (" in said and "unchanged: one, two, three" in said
    assert eventually(lambda: site.serves("four"))
    replace(site.file, site.text(*POOLS, "four", endpoints=f"{LOOPBACK}:{site.servers['one'].server_port}"))
    assert site.reload() == "unchanged: one, two, three, four\n"
    assert eventually(lambda: site.serves("three", "one"))
    replace(site.file, site.text("one", "four"))
    site.reload()
    assert eventually(lambda: site.ask("three").status == 404)
    assert site.serves("one") and site.serves("four")
    replace(site.file, site.text("one", "two", "four"))
    assert "two: generation" in site.reload()
    assert eventually(lambda: site.serves("two"))
    site.picker.page()


def test_a_pool_that_comes_with_a_bad_configuration_is_not_served_until_it_is_good(site: Site) -> None:
    replace(site.folder / "four.yaml", "plugins: [{type: no-scorer}]\n")
    replace(site.file, site.text(*POOLS, "four"))
    done = site.epp("reload")
    assert "four: refused: " in done.stderr and done.returncode == ExitCode.CONFIG
    assert site.ask("four").status == 404 and site.serves("one")
    replace(site.folder / "four.yaml", QUEUE)
    assert "four: generation" in site.reload()
    assert eventually(lambda: site.serves("four"))


def test_what_needs_a_restart_is_refused_with_the_reason(site: Site) -> None:
    (port,) = free_ports(1)
    for more, why in (
        (f"- {{name: five, port: {port}, endpoints: ['127.0.0.1:1']}}\n", f"port {port} is new"),
        ("- {name: five, models: [m], maxEndpoints: 5000, endpoints: ['127.0.0.1:1']}\n", "there is memory for 64 of it"),
        ("".join(f"- {{name: p{n}, models: [m{n}], endpoints: ['127.0.0.1:1']}}\n" for n in range(9)), "places for pools are taken"),
        ("- {name: five, models: [m], selector: app=x, targetPorts: [1]}\n", "of a pool in Kubernetes changes"),
    ):
        replace(site.file, site.text(more=more))
        done = site.epp("reload")
        assert done.returncode == ExitCode.CONFIG
        assert f"{site.file}:15:" in done.stderr or "p8" in done.stderr
        assert why in done.stderr and "restart the picker" in done.stderr
    assert all(site.serves(pool) for pool in POOLS)


def test_a_configuration_that_crashes_workers_goes_back_and_a_new_one_of_another_pool_stays(site: Site) -> None:
    replace(site.folder / "one.yaml", ODD)
    replace(site.folder / "two.yaml", CACHE)
    site.reload()
    assert site.generations() == [2, 2, 1]
    for prompt in ("first", "second"):
        site.ask("one", prompt, **{"x-request-id": "crash"})
        assert eventually(lambda: site.picker.complete(2), 30.0)
        assert eventually(lambda: site.serves("two"), 30.0)
    assert eventually(lambda: site.generation("one") == 3, 30.0)
    assert site.generations() == [3, 2, 1]
    assert eventually(lambda: all(site.serves(pool) for pool in POOLS), 30.0)


@pytest.mark.parametrize("child", ["supervisor", "worker 0"])
def test_a_process_that_is_killed_while_a_pool_reloads_has_a_successor_with_what_is_in_force(site: Site, child: str) -> None:
    assert all(site.serves(pool) for pool in POOLS)
    replace(site.folder / "one.yaml", CACHE)
    replace(site.file, site.text(*POOLS, "four"))
    asked = threading.Thread(target=lambda: site.epp("reload", "--timeout=60s"))
    asked.start()
    pid = child_pid(site.picker, child)
    time.sleep(0.8)  # the command starts, and the trial runs or has just ended
    os.kill(pid, signal.SIGKILL)
    asked.join()
    assert eventually(lambda: child_pid(site.picker, child) not in (0, pid) and site.picker.complete(2), 30.0)
    assert eventually(lambda: site.generations() == [2, 1, 1], 30.0)
    assert eventually(lambda: all(site.serves(pool) for pool in (*POOLS, "four")), 30.0)
    assert "unchanged: one, two, three, four" in site.reload()


def test_a_pool_may_go_while_its_reload_is_under_way_and_each_command_gets_its_answer(site: Site) -> None:
    site.slow.touch()
    replace(site.folder / "two.yaml", ODD)
    answers: dict[str, Any] = {}

    def command(name: str, *flags: str) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.__setitem__(name, site.epp("reload", "--timeout=40s", *flags)))
        thread.start()
        return thread

    first = command("two", "--pool=two")
    time.sleep(1.5)
    replace(site.file, site.text("one", "three"))
    second = command("all")
    first.join()
    second.join()
    assert answers["two"].returncode == 0 or "error[no-pool]" in answers["two"].stderr
    assert answers["all"].returncode == 0, answers["all"].stderr
    assert answers["all"].stdout == "unchanged: one, three\n"
    assert eventually(lambda: site.ask("two").status == 404)
    assert site.serves("one") and site.serves("three")


def test_two_reloads_of_two_pools_at_once_both_come_into_force(site: Site) -> None:
    for name in ("one", "two"):
        replace(site.folder / f"{name}.yaml", CACHE)
    answers: list[CompletedProcess[str]] = []
    threads = [threading.Thread(target=lambda pool=pool: answers.append(site.epp("reload", f"--pool={pool}"))) for pool in ("one", "two")]  # type: ignore[misc]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join()
    assert [answer.returncode for answer in answers] == [0, 0], [answer.stderr for answer in answers]
    assert site.generations() == [2, 2, 1]


def test_files_that_change_are_followed_with_config_watch(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with servers(4) as started:
        site = Site(cluster, started, monkeypatch, "--config-watch")
        replace(site.folder / "two.yaml", CACHE)
        assert eventually(lambda: site.generations() == [1, 2, 1], 20.0)
        replace(site.file, site.text(*POOLS, "four"))
        assert eventually(lambda: site.serves("four"), 20.0)
        replace(site.folder / "four.yaml", CACHE)
        assert eventually(lambda: site.generation("four") == 3, 20.0)


def test_the_page_and_the_commands_show_what_is_in_force_for_each_pool(site: Site) -> None:
    replace(site.folder / "one.yaml", "plugins: [{type: no-scorer}]\n")
    replace(site.folder / "two.yaml", CACHE)
    site.epp("reload")
    page = site.picker.page()
    assert 'llm_d_epp_config_last_reload_successful{pool="one"} 0' in page
    assert 'llm_d_epp_config_last_reload_successful{pool="two"} 1' in page
    where = (f"--run-dir={site.folder / 'run'}", f"--metrics-port={site.picker.metrics}")
    shown = json.loads(run(python("workers", "top", "--once", "--json", *where)).stdout)
    configurations = {pool["name"]: pool["configuration"] for pool in shown["pools"]}
    assert [configurations[pool]["generation"] for pool in POOLS] == [1, 2, 1]
    assert "error[unknown-type]" in configurations["one"]["last_reload_failed"]
    assert configurations["two"]["workers"] == 2
