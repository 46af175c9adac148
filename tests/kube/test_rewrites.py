"""InferenceModelRewrites of the API server, also together with a directory: which rules count, and the effect of a bad rule.

The API server measures ages in whole seconds, so the tests create objects of different age more than a second apart.
"""

import json
import os
import signal
import time
from pathlib import Path

from epp.request.model_rewrite import Rules
from tests.kube.client import Object
from tests.kube.objects import LEGACY, NEW, rewrite
from tests.kube.table import Table
from tests.kube.world import World, supervisor_of, until
from workers.shared.documents import REWRITES
from workers.worker import rewrites

A_SECOND_S = 1.1
GENERIC = [{"targets": [{"modelRewrite": "for-all"}]}]


def rules(table: Table) -> dict[str, tuple[str, ...]]:
    """The object and the targets that count for each model. "" stands for all other models."""
    found = table._documents.read(REWRITES)
    known = rewrites.decode(found[1]) if found is not None else Rules()
    choices = {model: choice for model in (*known.exact, "") if (choice := known.choice(model)) is not None}
    return {model: (choice.rewrite, *choice.models) for model, choice in choices.items()}


def followed(world: World, *flags: str) -> Table:
    world.pool()
    return world.table(world.picker(*flags))


def generic(world: World, name: str) -> Object:
    return rewrite(world.space, name, "", {}) | {"spec": {"poolRef": {"name": "pool"}, "rules": GENERIC}}


def test_the_oldest_rule_for_a_model_counts_and_after_it_the_next_one(world: World) -> None:
    space, kube = world.space, world.kube
    eldest = kube.create(rewrite(space, "z-eldest", "alias", {"one": 90, "other": 10}))
    kube.create(generic(world, "a-generic"))
    time.sleep(A_SECOND_S)
    table = followed(world)
    kube.create(rewrite(space, "b-younger", "alias", {"two": 1}))
    kube.create(rewrite(space, "c-foreign", "foreign", {"three": 1}, of="other"))
    kube.create(rewrite(space, "d-last", "last", {"four": 1}))
    until(lambda: "last" in rules(table), "all are known")
    assert rules(table) == {"alias": ("z-eldest", "one", "other"), "last": ("d-last", "four"), "": ("a-generic", "for-all")}
    kube.delete(eldest)
    until(lambda: rules(table)["alias"] == ("b-younger", "two"), "the younger one counts")


def test_the_newer_group_wins_a_name_in_both_groups(world: World) -> None:
    world.kube.create(rewrite(world.space, "both", "alias", {"old": 1}, group=LEGACY))
    table = followed(world)
    assert rules(table) == {"alias": ("both", "old")}, "ready means that rules are known"
    new = world.kube.create(rewrite(world.space, "both", "alias", {"new": 1}, group=NEW))
    until(lambda: rules(table)["alias"] == ("both", "new"), "the newer group counts")
    world.kube.delete(new)
    until(lambda: rules(table)["alias"] == ("both", "old"), "the older group counts again")


def test_a_bad_rule_is_reported_with_its_name_and_field_and_the_last_good_one_stays(world: World) -> None:
    world.pool()
    picker = world.picker()
    table = world.table(picker)
    canary = world.kube.create(rewrite(world.space, "canary", "alias", {"one": 1}))
    until(lambda: "alias" in rules(table), "the rule")
    for weight in (0, 2_000_000):
        world.kube.apply(rewrite(world.space, "canary", "alias", {"one": weight}))
    until(lambda: "'2000000' is not an integer from 1 to 1000000" in picker.child.text(), "it is reported")
    (line, *_) = [line for line in picker.child.text().splitlines() if "'2000000' is not an integer" in line]
    fields = json.loads(line)
    assert (fields["name"], fields["namespace"]) == ("canary", world.space)
    assert fields["reason"].startswith("InferenceModelRewrite 'canary': spec.rules[0].targets[0]")
    assert rules(table) == {"alias": ("canary", "one")}
    world.kube.apply(rewrite(world.space, "canary", "alias", {"two": 1}))
    until(lambda: rules(table)["alias"] == ("canary", "two"), "a good one counts again")
    world.kube.delete(canary)
    until(lambda: not rules(table), "it is gone")


def test_the_directory_wins_its_names_and_its_rules_are_older_than_those_of_the_api(world: World, tmp_path: Path) -> None:
    world.kube.create(rewrite(world.space, "both", "alias", {"from-the-api": 1}))
    world.kube.create(rewrite(world.space, "api", "shared", {"from-the-api": 1}))
    objects = [rewrite(world.space, "both", "alias", {"from-the-file": 1}), rewrite(world.space, "file", "shared", {"from-the-file": 1})]
    file = tmp_path / "rewrites.json"
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    table = followed(world, f"--objects-dir={tmp_path}")
    assert rules(table) == {"alias": ("both", "from-the-file"), "shared": ("file", "from-the-file")}
    file.unlink()
    until(lambda: rules(table) == {"alias": ("both", "from-the-api"), "shared": ("api", "from-the-api")}, "the API's rules")


def test_a_new_supervisor_keeps_the_known_rules(world: World) -> None:
    world.pool()
    picker = world.picker()
    table = world.table(picker)
    world.kube.create(rewrite(world.space, "canary", "alias", {"one": 1}))
    until(lambda: "alias" in rules(table), "the rule")
    os.kill(supervisor_of(picker.child.pid), signal.SIGKILL)
    known: set[object] = set()
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        known.add(rules(table).get("alias"))
        time.sleep(0.005)
    assert known == {("canary", "one")}
    world.kube.apply(rewrite(world.space, "canary", "alias", {"two": 1}))
    until(lambda: rules(table)["alias"] == ("canary", "two"), "the successor follows")
