"""The configuration changes while requests run: through Envoy, with broken configurations, hostile plugins, and killed processes."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.demo.children import python
from tests.bench import reload as bench
from tests.e2e.cluster import CHAT, COMPLETIONS, Cluster, Picker, ask, chat, completion, eventually, run
from tests.epp.config.test_invalid_documents import CASES
from workers.cli.reload import Watched
from workers.shared.reload_status import ReloadStatus

PAUSE_S = 0.05  # between two requests
HEAD = "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\n"
PLUGIN = """
import os, time
from epp.plugin import Candidates, Profile, Request, Scorer, Scores, plugin
import numpy as np
kept = []

@plugin("odd-scorer")
class Odd(Scorer):
    def __init__(self, name, params):
        super().__init__(name, params)
        {constructor}

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        {call}
        return np.zeros(len(candidates))
"""
MEMBER = "  - {pluginRef: odd-scorer, weight: 1}\n"
HOSTILE = {
    "raise RuntimeError('no')": "RuntimeError: no",
    "raise SystemExit(0)": "odd-scorer",
    "os._exit(0)": "its process ended before it was done",
    "os.kill(os.getpid(), 9)": "its process ended before it was done",
    "os.fork() or time.sleep(60)": "started a process",
}


class World:
    """Holds a picker that follows its files, and reads the state of its reloads."""

    def __init__(self, cluster: Cluster, picker: Picker, config: Path, plugin: Path, endpoints: Path) -> None:
        self.cluster = cluster
        self.picker, self.config, self.plugin, self.endpoints = picker, config, plugin, endpoints
        self.watched: Watched = bench.watch(cluster, picker)

    def status(self) -> ReloadStatus:
        status = self.watched.status()
        assert status is not None
        return status

    def after(self, file: Path, text: str) -> ReloadStatus:
        """Replaces the text of a file. Returns the state after the reload that this causes."""
        before = self.status().finished
        bench.replace(file, text)
        assert eventually(lambda: self.status().finished > before and not self.status().busy, 30.0)
        return self.status()

    def discovery(self, plugins: str = "", members: str = "", more: str = "") -> str:
        """Returns a configuration with these plugins (YAML), and with these members of its profile."""
        return (
            f"{HEAD}{more}plugins:\n- {{type: queue-scorer}}\n{plugins}"
            f"- {{type: file-discovery, parameters: {{path: {self.endpoints}}}}}\n"
            f"schedulingProfiles:\n- name: default\n  plugins:\n  - {{pluginRef: queue-scorer, weight: 2}}\n{members}"
            "dataLayer: {discovery: {endpoints: {pluginRef: file-discovery}}}\n"
        )


@pytest.fixture
def world(cluster: Cluster) -> Iterator[World]:
    yield from worlds(cluster)


def worlds(cluster: Cluster) -> Iterator[World]:
    """Starts a picker in this cluster, and yields its world."""
    with bench.started(cluster) as (picker, config, plugin, endpoints):
        made = World(cluster, picker, config, plugin, endpoints)
        with contextlib.closing(made.watched):
            yield made


def test_a_stream_ends_on_its_configuration_and_new_requests_use_the_new_one(world: World) -> None:
    port = world.cluster.envoy(world.picker)
    assert ask(port, COMPLETIONS, completion("a", max_tokens=1)).status == 200
    picks = world.picker.counter("picks_total")
    answers: list[bytes] = []
    body = chat("Tell me a long story", stream=True, max_tokens=400)
    long = threading.Thread(target=lambda: answers.append(ask(port, CHAT, body).body))
    long.start()
    assert eventually(lambda: world.picker.counter("picks_total") > picks)
    status = world.after(world.config, world.discovery("- {type: kv-cache-utilization-scorer}\n"))
    assert (status.generation, status.successful) == (2, True)
    assert set(world.watched.generations()) == {2}
    assert long.is_alive()
    assert ask(port, COMPLETIONS, completion("b", max_tokens=1)).status == 200
    long.join()
    assert answers[0].rstrip().endswith(b"[DONE]")
    page = world.picker.page()
    assert "llm_d_epp_config_generation 2" in page
    assert "llm_d_epp_config_last_reload_successful 1" in page
    assert f'config_hash="{status.hash}"' in page
    assert world.picker.counter("picks_total") >= picks + 2


def test_flow_control_can_be_switched_on_and_off(world: World) -> None:
    port = world.cluster.envoy(world.picker)
    for more in ("featureGates: [flowControl]\n", "", "featureGates: [flowControl]\n"):
        assert world.after(world.config, world.discovery(more=more)).successful
        assert ask(port, COMPLETIONS, completion("a", max_tokens=1)).status == 200
        assert ("flow_control_pool_saturation" in world.picker.page()) == bool(more)


def faults(count: int) -> list[tuple[str, list[str]]]:
    """Returns `count` invalid configurations with their errors: first one for each rule, then others."""
    by_rule = {found[0].split("]")[0]: (text, found) for text, found in reversed(CASES)}
    others = [case for case in CASES if case not in by_rule.values()]
    return [*by_rule.values(), *others][:count]


def test_60_broken_configurations_change_nothing_and_each_is_reported(world: World) -> None:
    page = lambda: world.picker.page()  # noqa: E731
    first = world.status()
    for number, (text, (found, *_)) in enumerate(faults(60)):
        status = world.after(world.config, text)
        assert not status.successful
        place, error = f"{world.config}:", found.removeprefix("-> ").removesuffix("…")  # line, column, rule, reason
        assert place + error in status.text or f"{place} {error}" in status.text  # a few faults have no line
        assert (status.generation, status.hash, status.finished) == (1, first.hash, number + 1)
    assert "llm_d_epp_config_last_reload_successful 0" in page()
    assert set(world.watched.generations()) == {1}


@pytest.mark.parametrize("place", ["constructor", "call"])
def test_a_hostile_plugin_is_refused_by_the_trial(world: World, place: str) -> None:
    config = world.discovery("- {type: odd-scorer}\n", MEMBER)
    harmless = {"constructor": "pass", "call": "pass"}
    world.plugin.write_text(PLUGIN.format(**harmless))
    assert world.after(world.config, config).successful
    generation = world.status().generation
    for statement, said in HOSTILE.items():
        status = world.after(world.plugin, PLUGIN.format(**(harmless | {place: statement})))
        assert said in status.text, statement
        assert (status.successful, status.generation) == (False, generation)
    assert set(world.watched.generations()) == {generation}


@pytest.mark.parametrize(
    ("place", "statement", "said"),
    [
        ("call", "kept.append(bytearray(1 << 20))", "a plugin leaks"),
        ("constructor", "while True: kept.append(bytearray(1 << 24))", "memory"),
    ],
)
def test_a_plugin_that_leaks_is_refused(world: World, place: str, statement: str, said: str) -> None:
    world.plugin.write_text(PLUGIN.format(**({"constructor": "pass", "call": "pass"} | {place: statement})))
    config = world.discovery("- {type: odd-scorer}\n", MEMBER)
    status = world.after(world.config, config)
    assert not status.successful
    assert said in status.text.lower()


def test_a_plugin_that_ends_workers_after_its_trial_is_taken_back(world: World) -> None:
    port = world.cluster.envoy(world.picker)
    in_workers = "open('/proc/self/comm').read().startswith('epp: worker') and os._exit(3)"
    world.plugin.write_text(PLUGIN.format(constructor="pass", call=in_workers))
    before = world.status().hash
    assert world.after(world.config, world.discovery("- {type: odd-scorer}\n", MEMBER)).successful
    for number in range(200):
        ask(port, COMPLETIONS, completion(f"request {number}", max_tokens=1))
        if "rolled-back" in world.status().text:
            break
    assert "2 processes ended with it" in world.status().text
    assert eventually(lambda: not world.status().busy)
    assert (world.status().successful, world.status().hash) == (False, before)
    assert eventually(lambda: ask(port, COMPLETIONS, completion("afterwards", max_tokens=1)).status == 200)


@pytest.mark.parametrize("place", ["constructor", "call"])
def test_a_plugin_that_hangs_is_refused_and_requests_go_on(world: World, place: str) -> None:
    port = world.cluster.envoy(world.picker)
    world.plugin.write_text(PLUGIN.format(**({"constructor": "pass", "call": "pass"} | {place: "time.sleep(1000)"})))
    before = world.status().finished
    bench.replace(world.config, world.discovery("- {type: odd-scorer}\n", MEMBER))
    while world.status().finished == before:
        assert ask(port, COMPLETIONS, completion("a", max_tokens=1)).status == 200
        time.sleep(PAUSE_S)
    assert "took more than" in world.status().text


def test_a_killed_process_comes_back_with_the_configuration_in_force(world: World) -> None:
    for number in range(6):
        before = world.status()
        bench.replace(world.config, world.discovery(f"- {{type: max-score-picker, name: p{number}}}\n"))
        pids = [pid for pid in children(world.picker.child.process.pid) if number % 3 or pid]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[number % len(pids)], signal.SIGKILL)
        assert eventually(lambda before=before: world.status().finished > before.finished and not world.status().busy, 30.0)
        assert eventually(lambda: world.watched.generations() == [world.status().generation] * bench.WORKERS)


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_epp_reload_waits_for_the_result(world: World) -> None:
    where = ("reload", f"--instance={world.picker.instance}", f"--run-dir={world.cluster.directory / 'run'}")
    done = run(python("workers", *where))
    assert (done.returncode, done.stdout.split(" (")[0]) == (0, "generation 2")
    world.config.write_text("plugins: [")
    refused = run(python("workers", *where))
    assert refused.returncode == 78
    assert "error[yaml-syntax]" in refused.stderr


def test_requests_go_on_while_the_configuration_changes_again_and_again(world: World) -> None:
    port = world.cluster.envoy(world.picker)
    reloader = bench.Reloader(world.watched, world.config, world.plugin, world.endpoints)
    figures = asyncio.run(bench.measured(port, world.picker, reloader, 20.0, 6, 0.5))
    assert figures.failed == []
    assert figures.reloads.missed == 0
