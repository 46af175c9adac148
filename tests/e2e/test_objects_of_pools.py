"""Objectives and model rewrites of several pools from one directory, behind a real Envoy."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.demo.children import python
from loadtest.demo.ports import free_ports
from tests.e2e.cluster import COMPLETIONS, Answer, Cluster, ask, eventually, run, serve
from tests.e2e.echo import gateway, servers
from tests.e2e.test_pools import addresses
from tests.e2e.test_rewrites import rewrite
from workers.host.exit_codes import ExitCode

TEXT = "pools:\n- {{name: a, port: {0}, endpoints: {1}}}\n- {{name: b, port: {2}, endpoints: {3}}}\n"


def objective(name: str, priority: int, *pools: str) -> dict[str, Any]:
    """Makes an objective. Without `pools`, it is for all."""
    references: list[dict[str, str]] = [{"name": pool} for pool in pools]
    spec: dict[str, Any] = {"priority": priority} | ({"poolRef": references if len(pools) > 1 else references[0]} if pools else {})
    return {"apiVersion": "llm-d.ai/v1alpha2", "kind": "InferenceObjective", "metadata": {"name": name}, "spec": spec}


def for_all(written: dict[str, Any]) -> dict[str, Any]:
    del written["spec"]["poolRef"]
    return written


class Site:
    """A picker of the pools a and b, which gets objects from a directory."""

    def __init__(self, cluster: Cluster, listed: tuple[list[str], list[str]]) -> None:
        self.objects = cluster.directory / "objects"
        self.objects.mkdir()
        ports = free_ports(2)
        self.write(
            rewrite("only-a", ["chat"], ("chat-of-a", 1), pool="a"),
            rewrite("only-b", ["chat"], ("chat-of-b", 1), pool="b"),
            for_all(rewrite("both", ["shared"], ("shared-v2", 1))),
            objective("gold", 7, "a"),
            objective("everywhere", 3),
            objective("listed", 5, "a", "b"),
            objective("elsewhere", 9, "c"),
        )
        text = TEXT.format(ports[0], json.dumps(listed[0]), ports[1], json.dumps(listed[1]))
        self.picker = cluster.picker(cluster.directory, f"--objects-dir={self.objects}", workers=1, pools_text=text)
        self.ports = {name: gateway(cluster, port) for name, port in zip("ab", ports, strict=True)}
        self.where = (f"--run-dir={cluster.directory / 'run'}", f"--metrics-port={self.picker.metrics}")

    def write(self, *objects: dict[str, Any]) -> None:
        (self.objects / "objects.yaml").write_text("# objects\n" + yaml.safe_dump_all(objects))

    def ask(self, pool: str, model: str = "chat", **headers: str) -> Answer:
        body = json.dumps({"model": model, "prompt": "hello", "max_tokens": 1}).encode()
        return ask(self.ports[pool], COMPLETIONS, body, {name.replace("_", "-"): value for name, value in headers.items()})

    def model(self, pool: str, model: str = "chat") -> str:
        """Returns the model that the server of the pool was asked for."""
        return str(json.loads(self.ask(pool, model).json()["body"])["model"])

    def priority(self, pool: str, name: str) -> int:
        """Returns the priority of a request that names this objective."""
        assert self.ask(pool, x_gateway_inference_objective=name).status == 200
        done = run(python("workers", "explain", *self.where, "--last", "--pool", pool))
        assert done.returncode == 0, done.stderr
        found = re.search(r"priority (-?\d+) ", done.stdout)
        assert found is not None, done.stdout
        return int(found[1])


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Cluster() as cluster, servers(2) as started:
        yield Site(cluster, (addresses(started[:1]), addresses(started[1:])))


def test_rewrites_hold_for_the_pools_that_they_name_or_for_all(site: Site) -> None:
    assert {pool: site.model(pool) for pool in "ab"} == {"a": "chat-of-a", "b": "chat-of-b"}
    assert {site.model(pool, "shared") for pool in "ab"} == {"shared-v2"}


@pytest.mark.parametrize(
    ("name", "in_a", "in_b"), [("gold", 7, 0), ("everywhere", 3, 3), ("listed", 5, 5), ("elsewhere", 0, 0), ("none", 0, 0)]
)
def test_objectives_hold_for_the_pools_that_they_name_or_for_all(site: Site, name: str, in_a: int, in_b: int) -> None:
    assert (site.priority("a", name), site.priority("b", name)) == (in_a, in_b)


def test_an_object_of_a_pool_that_is_not_served_is_reported_once(site: Site) -> None:
    lines = [line for line in site.picker.child.text().splitlines() if "not served here" in line]
    assert len(lines) == 1 and "InferenceObjective 'elsewhere' is for pool 'c'" in lines[0]


def test_a_change_of_the_directory_reaches_each_pool(site: Site) -> None:
    text = (site.objects / "objects.yaml").read_text()
    try:
        site.write(rewrite("only-b", ["chat"], ("later-of-b", 1), pool="b"))
        assert eventually(lambda: site.model("b") == "later-of-b")
        assert site.model("a") == "chat", "its rewrite is gone"
    finally:
        (site.objects / "objects.yaml").write_text(text)
    assert eventually(lambda: site.model("a") == "chat-of-a" and site.model("b") == "chat-of-b")


def test_a_bad_object_is_refused_at_start(tmp_path: Path) -> None:
    file, objects = tmp_path / "pools.yaml", tmp_path / "objects"
    objects.mkdir()
    file.write_text("pools: [{name: a, port: 9102, endpoints: ['127.0.0.1:1']}, {name: b, models: [m], endpoints: ['127.0.0.1:1']}]")
    written = [objective("gold", 7), objective("gold", 8)]
    (objects / "objects.yaml").write_text(yaml.safe_dump_all(written))
    ended = run([*serve(file, *free_ports(3), 1, tmp_path / "run", pools=True), f"--objects-dir={objects}"])
    assert ended.returncode == ExitCode.CONFIG, ended.stderr
    assert ended.stderr.count("InferenceObjective 'gold' is given twice") == 1
    checked = run(python("workers", "config", "check", str(file), f"--objects-dir={objects}"))
    assert checked.returncode == ExitCode.CONFIG and "error[bad-object]" in checked.stderr
