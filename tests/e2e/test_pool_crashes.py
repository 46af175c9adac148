"""A pool with a plugin that ends workers is taken out of service, and the others are served on."""

import http.client
import json
import os
import re
import signal
import subprocess
from typing import Any

import pytest

from loadtest.demo.children import python
from tests.e2e.cluster import COMPLETIONS, Answer, Cluster, Picker, ask, eventually, run
from tests.e2e.echo import gateway, servers

PLUGIN = """
import os
import signal

from epp.plugin import NoParams, ResponseComplete, Scorer, plugin


@plugin("odd-scorer")
class Odd(Scorer, ResponseComplete):
    \"\"\"A plugin that ends its process.\"\"\"

    def __init__(self, name, params: NoParams) -> None:
        super().__init__(name, params)
        if "{at}" == "load" and open("/proc/self/comm").read().startswith("epp: worker"):
            {ends}

    def score(self, request, candidates, profile):
        if "{at}" == "decision":
            {ends}
        return [0.5] * len(candidates)

    def response_complete(self, request, decision, response):
        if "{at}" == "answer":
            {ends}
"""
TEXT = """\
pools:
- name: {0}
  models: ["{0}"]
  endpoints: [{2}]
  config: "{{plugins: [{{type: {3}, name: mine}}]}}"
- name: {1}
  models: ["{1}"]
  endpoints: [{2}]
  config: "{{plugins: [{{type: {4}, name: mine}}]}}"
"""
TRIES = 20


class Site:
    """A picker of two pools. That with the name `odd` has the plugin."""

    def __init__(self, cluster: Cluster, address: str, at: str, ends: str, *, first: bool = False) -> None:
        folder = cluster.directory / "plugins"
        folder.mkdir()
        (folder / "odd.py").write_text(PLUGIN.format(at=at, ends=ends))
        names, types = ("calm", "odd"), ("queue-scorer", "odd-scorer")
        order = slice(None, None, -1 if first else 1)
        text = TEXT.format(*names[order], json.dumps(address), *types[order])
        self.picker: Picker = cluster.picker(cluster.directory, f"--plugin-path={folder}", workers=2, pools_text=text)
        self.directory = cluster.directory
        self.port = gateway(cluster, self.picker.grpc)

    def ask(self, pool: str, prompt: str = "hello") -> Answer:
        """Sends a request. The status is 0 if its answer is cut off, because a worker ends during the answer."""
        try:
            return ask(self.port, COMPLETIONS, json.dumps({"model": pool, "prompt": prompt}).encode())
        except http.client.HTTPException:
            return Answer(0, {}, b"")

    def calm(self) -> list[int]:
        return [self.ask("calm").status for _ in range(TRIES)]

    def doctor(self) -> subprocess.CompletedProcess[str]:
        where = (f"--run-dir={self.directory / 'run'}", f"--metrics-port={self.picker.metrics}")
        return run(python("workers", "doctor", *where, "--json"))

    def said(self, event: str) -> list[dict[str, Any]]:
        lines = (json.loads(line) for line in re.findall(r"^\{.*\}$", self.picker.child.text(), re.MULTILINE))
        return [line for line in lines if line["event"].startswith(event)]


@pytest.mark.parametrize(
    ("at", "ends", "first"),
    [
        ("decision", "os._exit(3)", False),
        ("decision", "os.abort()", True),
        ("decision", "os._exit(0)", False),
        ("answer", "os.kill(os.getpid(), signal.SIGSEGV)", False),
        ("load", "os._exit(3)", False),
        ("load", "os._exit(3)", True),
    ],
)
def test_a_pool_whose_plugin_has_ended_two_workers_gets_503_and_the_others_are_served(
    cluster: Cluster, at: str, ends: str, first: bool
) -> None:
    with servers(1) as (server,):
        site = Site(cluster, server.address, at, ends, first=first)
        out = "pool is out of service"
        assert eventually(lambda: site.ask("odd", str(len(site.said("child ended")))).status == 503 and bool(site.said(out)), 30.0)
        assert eventually(lambda: site.picker.complete(2), 30.0)
        refused = site.ask("odd")
        text = refused.json()["error"]["message"]
        assert (refused.status, "pool 'odd' is out of service, because its plugins" in text) == (503, True)
        assert site.calm() == [200] * TRIES
        ended = len(site.said("child ended"))
        assert ended == 2 or (ended == 3 and at == "load" and first), "a third worker may begin to load before the second has ended"
        (line,) = site.said(out)
        assert (line["pool"], line.get("plugin")) == ("odd", None if at == "load" else "mine")
        assert [each["pool"] for each in site.said("a worker ended while")] == ["odd"] * ended
        (finding,) = [each for each in json.loads(site.doctor().stdout)["findings"] if each["rule"] == "out-of-service"]
        assert (finding["pool"], "mine" in finding["evidence"]) == ("odd", at != "load")


def test_a_reload_of_a_pool_brings_it_back(cluster: Cluster) -> None:
    with servers(1) as (server,):
        site = Site(cluster, server.address, "decision", "os._exit(3)")
        out = "pool is out of service"
        assert eventually(lambda: site.ask("odd", str(len(site.said("child ended")))).status == 503 and bool(site.said(out)), 30.0)
        (file,) = cluster.directory.glob("config-*.yaml")
        file.write_text(file.read_text().replace("odd-scorer", "queue-scorer"))
        os.kill(site.picker.child.pid, signal.SIGHUP)
        assert eventually(lambda: site.ask("odd").status == 200, 30.0)
        assert [site.ask("odd").status for _ in range(TRIES)] == site.calm() == [200] * TRIES
        assert not [each for each in json.loads(site.doctor().stdout)["findings"] if each["rule"] == "out-of-service"]


def test_a_killed_worker_blames_no_pool(cluster: Cluster) -> None:
    with servers(1) as (server,):
        site = Site(cluster, server.address, "decision", "os.kill(os.getpid(), signal.SIGKILL)")
        for number in range(4):
            site.ask("odd", str(number))
            assert eventually(lambda: site.picker.complete(2), 30.0)
        assert len(site.said("child ended")) == 4
        assert not site.said("pool is out of service")
        assert site.calm() == [200] * TRIES
