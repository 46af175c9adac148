"""A candidate is tried beside the configuration in force: as a shadow, with a share of the traffic, to its end for good or bad."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping

import pytest

from loadtest.demo.children import python
from tests.bench import reload as bench
from tests.e2e.cluster import COMPLETIONS, Cluster, ask, completion, eventually, run
from tests.e2e.test_reload import World, worlds
from tests.faults.watch import Watched as Processes
from workers.shared.reload_status import TryoutStatus

REFUSES = """
from epp.errors import Cause, Refused
from epp.plugin import Admitter, Candidates, Request, plugin

@plugin("refusing-admitter")
class Refusing(Admitter):
    def admit(self, request: Request, candidates: Candidates) -> None:
        raise Refused(Cause.NOT_ADMITTED, "never")
"""


@pytest.fixture
def world(cluster: Cluster) -> Iterator[World]:
    yield from worlds(cluster)


def epp(world: World, *command: str) -> "subprocess.CompletedProcess[str]":
    """Runs a command of `epp` for the picker."""
    where = (f"--instance={world.picker.instance}", f"--run-dir={world.cluster.directory / 'run'}")
    return run(python("workers", *command, *where))


def candidate(world: World, plugins: str = "", members: str = "") -> str:
    file = world.cluster.directory / "candidate.yaml"
    file.write_text(world.discovery(plugins, members))
    return str(file)


def tryout(world: World) -> TryoutStatus:
    found = world.status().tryout
    assert found is not None
    return found


def counted(world: World, metric: str, configuration: str) -> float:
    """Returns a counter of one configuration from the metrics page; 0 before the first count."""
    found = re.search(rf'^llm_d_epp_{metric}\{{\w+="{configuration}"\}} (\S+)$', world.picker.page(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def send(port: int, count: int, headers: Mapping[str, str] = {}) -> list[int]:
    """Sends `count` requests with different ids. Returns the status of each answer."""
    return [ask(port, COMPLETIONS, completion(f"request {n}", max_tokens=2), headers).status for n in range(count)]


def test_a_shadow_decides_and_is_compared_and_nothing_follows_it(world: World) -> None:
    port = world.cluster.envoy(world.picker)
    done = epp(world, "try", candidate(world, "- {type: kv-cache-utilization-scorer}\n"), "--share=0")
    assert (done.returncode, done.stdout.split(" (")[0]) == (0, "candidate 2"), done.stderr
    assert done.stdout.endswith("is tried in 2 workers, as a shadow\n")
    assert send(port, 20) == [200] * 20
    assert eventually(lambda: tryout(world).agreed + tryout(world).differed == 20)
    assert eventually(lambda: tryout(world).in_force.requests == 20)
    assert (tryout(world).candidate.requests, tryout(world).failed, world.status().generation) == (0, 0, 1)
    assert tryout(world).candidate.decisions == 20
    assert "llm_d_epp_tryout_generation 2" in world.picker.page()
    assert set(world.watched.generations()) == {1}


def test_a_share_decides_that_part_of_the_requests_and_is_promoted(world: World) -> None:
    port = world.cluster.envoy(world.picker)
    file = candidate(world, "- {type: kv-cache-utilization-scorer}\n")
    assert epp(world, "try", file, "--share=50%").returncode == 0
    assert send(port, 60) == [200] * 60
    requests = "tryout_requests_total"
    assert eventually(lambda: counted(world, requests, "in_force") + counted(world, requests, "candidate") == 60)
    assert 10 <= counted(world, requests, "candidate") <= 50
    assert counted(world, "tryout_ttft_seconds_count", "candidate") == counted(world, requests, "candidate")
    assert "llm_d_epp_tryout_share 0.5" in world.picker.page()
    done = epp(world, "promote")
    assert (done.returncode, done.stdout.split(" (")[0]) == (0, "generation 2"), done.stderr
    status = world.status()
    assert (status.generation, status.tryout, status.source) == (2, None, file)
    assert set(world.watched.generations()) == {2}
    assert send(port, 4) == [200] * 4
    back = epp(world, "rollback")
    assert (back.returncode, back.stdout.split(" (")[0]) == (0, "generation 3"), back.stderr
    assert world.status().source == str(world.config)
    assert epp(world, "rollback").returncode == 78, "there is none before the first"


def test_a_flow_stays_with_the_configuration_that_decided_it_first(world: World) -> None:
    port = world.cluster.envoy(world.picker)
    assert epp(world, "try", candidate(world), "--share=50%", "--by=flow").returncode == 0
    before = 0.0
    for flow in range(6):
        send(port, 8, {"x-llm-d-inference-fairness-id": f"tenant-{flow}"})
        total = 8 * (flow + 1)
        assert eventually(lambda total=total: tryout(world).in_force.requests + tryout(world).candidate.requests == total)
        new = tryout(world).candidate.requests - before
        assert new in (0, 8)
        before += new


def test_a_worse_candidate_is_rolled_back_by_the_picker(world: World) -> None:
    port = world.cluster.envoy(world.picker)
    assert world.after(world.plugin, bench.PLUGIN.format(version=1) + REFUSES).successful
    file = candidate(world, "- {type: refusing-admitter}\n")
    assert epp(world, "try", file, "--share=50%").returncode == 0
    for _ in range(40):
        send(port, 20)
        if world.status().tryout is None:
            break
    status = world.status()
    assert status.tryout is None
    assert "error[rolled-back]: candidate 3 is taken back: it is worse" in status.text
    assert "of its" in status.text and "requests failed" in status.text
    assert status.generation == 2
    assert eventually(lambda: send(port, 10) == [200] * 10)


def test_a_trial_ends_by_rollback_by_a_reload_and_by_the_next_candidate(world: World) -> None:
    assert epp(world, "try", candidate(world), "--share=5%").returncode == 0
    assert epp(world, "try", candidate(world, "- {type: kv-cache-utilization-scorer}\n"), "--share=5%").returncode == 0
    assert tryout(world).generation == 3
    done = epp(world, "rollback")
    assert (done.returncode, done.stderr) == (0, "candidate 3 is taken back: epp config rollback\n")
    assert (world.status().tryout, world.status().generation) == (None, 1)
    assert epp(world, "try", candidate(world), "--share=5%").returncode == 0
    status = world.after(world.config, world.discovery("- {type: lora-affinity-scorer}\n"))
    assert (status.successful, status.tryout, status.generation) == (True, None, 5)
    assert "candidate 4 is taken back: the configuration in force changes" in status.text


def test_a_candidate_is_refused_with_file_line_and_rule_and_commands_need_one(world: World) -> None:
    broken = world.cluster.directory / "broken.yaml"
    broken.write_text("plugins: [")
    refused = epp(world, "try", str(broken), "--share=0")
    assert refused.returncode == 78
    assert f"{broken}:2:1: error[yaml-syntax]" in refused.stderr
    assert "error[no-candidate]" in epp(world, "promote").stderr
    assert (world.status().tryout, world.status().generation) == (None, 1)
    assert epp(world, "try", str(broken), "--share=120%").returncode == 2


def test_a_worker_that_was_killed_comes_back_with_the_candidate(world: World) -> None:
    port = world.cluster.envoy(world.picker)
    assert epp(world, "try", candidate(world), "--share=100%").returncode == 0
    workers = Processes(world.picker.child.process.pid, world.picker.instance, world.picker.grpc)
    starts = workers.generation(1)
    os.kill(workers.children()[1], signal.SIGKILL)
    assert eventually(lambda: workers.up(1, starts), 30.0)
    assert eventually(lambda: set(workers.gauges("config_candidate")) == {2})
    assert send(port, 4) == [200] * 4
    assert eventually(lambda: tryout(world).candidate.requests == 4)
    assert tryout(world).in_force.requests == 0
