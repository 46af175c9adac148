"""Model rewrites behind a real gateway: the targets serve the requests for a model by weight, and clients see only its name."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from loadtest.demo.children import python
from tests.e2e.cluster import CHAT, COMPLETIONS, Answer, Cluster, Fleet, Picker, ask, events, eventually, run

ENGINE = ("--decode-ms", "1", "--prefill-us-per-token", "1")
SERVED = ("base-v1", "base-v2")
POOL = "pool"
COUNTED = "llm_d_epp_model_rewrite_decisions_total{"


def rewrite(name: str, models: list[str], *targets: tuple[str, int], pool: str = POOL) -> dict[str, Any]:
    """Makes a rewrite with one rule for these models, or for all models if `models` is empty. `targets`: (model, weight)."""
    rule: dict[str, Any] = {"targets": [{"modelRewrite": model, "weight": weight} for model, weight in targets]}
    if models:
        rule["matches"] = [{"model": {"type": "Exact", "value": model}} for model in models]
    return {
        "apiVersion": "llm-d.ai/v1alpha2",
        "kind": "InferenceModelRewrite",
        "metadata": {"name": name},
        "spec": {"poolRef": {"name": pool}, "rules": [rule]},
    }


class Site(NamedTuple):
    port: int
    picker: Picker
    fleet: Fleet
    objects: Path

    def write(self, *objects: dict[str, Any]) -> None:
        """Replaces the objects in the directory. The comment keeps the file from having zero bytes, which would not count."""
        (self.objects / "rewrites.yaml").write_text("# objects\n" + yaml.safe_dump_all(objects))

    def ask(self, model: str, path: str = COMPLETIONS, headers: Mapping[str, str] = {}, **more: Any) -> Answer:
        prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
        return ask(self.port, path, json.dumps({"model": model, "max_tokens": 3, **prompt, **more}).encode(), headers)

    def decisions(self, name: str) -> Counter[str]:
        """Returns target -> number of decisions, over all workers."""
        lines = [line for line in self.picker.page().splitlines() if line.startswith(COUNTED) and f'"{name}"' in line]
        return Counter({line.split('target_model="')[1].split('"')[0]: int(float(line.split()[-1])) for line in lines})

    def becomes(self, model: str, status: int) -> bool:
        return eventually(lambda: all(self.ask(model).status == status for _ in range(8)))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Cluster() as cluster:
        fleet = cluster.fleet(2, "--model", ",".join(SERVED), *ENGINE)
        objects = cluster.directory / "objects"
        objects.mkdir()
        flags = (f"--objects-dir={objects}", f"--pool-name={POOL}")
        picker = cluster.picker(fleet.file, *flags, workers=2)
        yield Site(cluster.envoy(picker), picker, fleet, objects)


def test_an_unknown_model_is_served_only_while_a_rule_rewrites_it(site: Site) -> None:
    assert site.ask("asked").status == 404
    site.write(rewrite("first", ["asked"], ("base-v1", 1)))
    assert site.becomes("asked", 200)
    assert site.ask("asked").json()["model"] == "asked"
    assert site.ask("unknown").status == 404
    assert site.ask("base-v2").json()["model"] == "base-v2"
    site.write()
    assert site.becomes("asked", 404)


def test_requests_are_shared_by_weight_and_counted_by_target(site: Site) -> None:
    site.write(rewrite("canary", ["shared"], ("base-v1", 3), ("base-v2", 1)))
    assert site.becomes("shared", 200)
    assert all(site.ask("shared").json()["model"] == "shared" for _ in range(150))
    counted = site.decisions("canary")
    assert counted.total() >= 158 and set(counted) == set(SERVED)
    assert 0.55 < counted["base-v1"] / counted.total() < 0.92, "five standard deviations"


def test_a_rule_for_the_model_wins_over_a_rule_for_all_models_and_over_a_header(site: Site) -> None:
    site.write(rewrite("all", [], ("base-v1", 1)), rewrite("one", ["asked"], ("base-v2", 1)))
    assert site.becomes("whatever", 200)
    before = site.decisions("one")
    assert site.ask("asked", headers={"x-llm-d-model-name-rewrite": "unknown"}).status == 200
    assert (site.decisions("one") - before) == Counter({"base-v2": 1})
    assert set(site.decisions("all")) == {"base-v1"}


def test_every_event_of_a_stream_has_the_model_name_of_the_client(site: Site) -> None:
    site.write(rewrite("r", ["asked"], ("base-v1", 1)))
    assert site.becomes("asked", 200)
    for path in (COMPLETIONS, CHAT):
        answer = site.ask("asked", path, stream=True)
        assert answer.status == 200 and b"base-v1" not in answer.body
        assert {event["model"] for event in events(answer.body)} == {"asked"}


def test_metrics_and_explanations_have_both_names(site: Site) -> None:
    site.write(rewrite("r", ["asked"], ("base-v1", 1)))
    assert site.becomes("asked", 200)
    assert 'request_total{model_name="asked",target_model_name="base-v1",' in site.picker.page()
    site.ask("asked", headers={"x-request-id": "renamed"})
    url = f"http://127.0.0.1:{site.picker.metrics}"
    explained = run(python("workers", "explain", "--request-id=renamed", f"--url={url}"))
    assert "model asked as base-v1" in explained.stdout


def test_a_bad_file_and_a_rule_for_another_pool_have_no_effect_and_are_logged(site: Site) -> None:
    site.write(rewrite("r", ["asked"], ("base-v1", 1)), rewrite("foreign", ["strange"], ("base-v1", 1), pool="other"))
    assert site.becomes("asked", 200)
    assert site.ask("strange").status == 404
    site.write(rewrite("r", ["asked"], ("base-v1", 0)))
    assert eventually(lambda: "weight: '0' is not an integer from 1 to 1000000" in site.picker.child.text())
    assert site.ask("asked").status == 200
    assert "InferenceModelRewrite 'foreign' is for pool 'other'" in site.picker.child.text()


def test_a_wrong_rewrite_is_reported_before_the_start(site: Site, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(rewrite("r", ["asked"], ("base-v1", -1))))
    config = tmp_path / "config.yaml"
    config.write_text("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n")
    fault = "InferenceModelRewrite 'r': spec.rules[0].targets[0].weight: '-1'"
    checked = run(python("workers", "check", str(config), f"--objects-dir={tmp_path}"))
    assert checked.returncode == 78 and "bad-object" in checked.stderr and fault in checked.stderr
    served = run(python("workers", "serve", "--endpoints=127.0.0.1:1", f"--objects-dir={tmp_path}"))
    assert served.returncode == 78 and fault in served.stderr
