"""InferenceModelRewrites of the API server, and of a directory beside it: which rules count, and what a bad one does.

Ages are the server's own: whole seconds, so objects that are to differ in age are made more than a second apart.
"""

import json
import os
import signal
import time
from pathlib import Path

from epp.model_rewrite import Rules
from tests.kube.client import Object
from tests.kube.objects import LEGACY, NEW, rewrite
from tests.kube.table import Table
from tests.kube.world import World, supervisor_of, until
from workers import rewrites
from workers.documents import REWRITES

A_SECOND_S = 1.1
GENERIC = [{"targets": [{"modelRewrite": "for-all"}]}]


def rules(table: Table) -> dict[str, tuple[str, ...]]:
    """By model, the object that counts and its targets; "" is every other model."""
    found = table._documents.read(REWRITES)
    known = rewrites.decode(found[1]) if found is not None else Rules()
    others = known.others()
    choices = known.by_model() | ({"": others} if others is not None else {})
    return {model: (choice.rewrite, *choice.models) for model, choice in choices.items()}


def followed(world: World, *flags: str) -> Table:
    world.pool()
    return world.table(world.picker(*flags))


def generic(world: World, name: str) -> Object:
    return rewrite(world.space, name, "", {}) | {"spec": {"poolRef": {"name": "pool"}, "rules": GENERIC}}


def test_the_oldest_rule_for_the_model_counts_and_then_the_next_one(world: World) -> None:
    space, kube = world.space, world.kube
    eldest = kube.create(rewrite(space, "z-eldest", "asked", {"one": 90, "other": 10}))
    kube.create(generic(world, "a-generic"))
    time.sleep(A_SECOND_S)
    table = followed(world)
    kube.create(rewrite(space, "b-younger", "asked", {"two": 1}))
    kube.create(rewrite(space, "c-foreign", "foreign", {"three": 1}, of="other"))
    kube.create(rewrite(space, "d-last", "last", {"four": 1}))
    until(lambda: "last" in rules(table), "all are known")
    assert rules(table) == {
        "asked": ("z-eldest", "one", "other"),
        "last": ("d-last", "four"),
        "": ("a-generic", "for-all"),
    }
    kube.delete(eldest)
    until(lambda: rules(table)["asked"] == ("b-younger", "two"), "the younger one counts")


def test_of_both_groups_the_newer_has_the_name(world: World) -> None:
    world.kube.create(rewrite(world.space, "both", "asked", {"old": 1}, group=LEGACY))
    table = followed(world)
    assert rules(table) == {"asked": ("both", "old")}, "ready means that rules are known"
    new = world.kube.create(rewrite(world.space, "both", "asked", {"new": 1}, group=NEW))
    until(lambda: rules(table)["asked"] == ("both", "new"), "the newer group counts")
    world.kube.delete(new)
    until(lambda: rules(table)["asked"] == ("both", "old"), "the older one counts again")


def test_a_bad_rule_is_reported_by_name_and_place_and_the_last_good_one_stays(world: World) -> None:
    world.pool()
    picker = world.picker()
    table = world.table(picker)
    made = world.kube.create(rewrite(world.space, "canary", "asked", {"one": 1}))
    until(lambda: "asked" in rules(table), "the rule")
    for weight in (0, 2_000_000):
        world.kube.apply(rewrite(world.space, "canary", "asked", {"one": weight}))
    until(lambda: "'2000000' is not an integer from 1 to 1000000" in picker.child.text(), "it is reported")
    assert (
        f"'canary' in namespace {world.space}: InferenceModelRewrite 'canary': spec.rules[0].targets[0]"
        in picker.child.text()
    )
    assert rules(table) == {"asked": ("canary", "one")}
    world.kube.apply(rewrite(world.space, "canary", "asked", {"two": 1}))
    until(lambda: rules(table)["asked"] == ("canary", "two"), "a good one counts again")
    world.kube.delete(made)
    until(lambda: not rules(table), "it is gone")


def test_a_directory_beside_the_api_has_its_names_and_is_older(world: World, tmp_path: Path) -> None:
    world.kube.create(rewrite(world.space, "both", "asked", {"of-the-api": 1}))
    world.kube.create(rewrite(world.space, "api", "shared", {"of-the-api": 1}))
    given = [
        rewrite(world.space, "both", "asked", {"of-the-file": 1}),
        rewrite(world.space, "file", "shared", {"of-the-file": 1}),
    ]
    file = tmp_path / "rewrites.json"
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": given}))
    table = followed(world, f"--objects-dir={tmp_path}")
    assert rules(table) == {"asked": ("both", "of-the-file"), "shared": ("file", "of-the-file")}
    file.unlink()
    until(lambda: rules(table) == {"asked": ("both", "of-the-api"), "shared": ("api", "of-the-api")}, "the API's count")


def test_a_new_supervisor_goes_on_with_the_rules_that_were_known(world: World) -> None:
    world.pool()
    picker = world.picker()
    table = world.table(picker)
    world.kube.create(rewrite(world.space, "canary", "asked", {"one": 1}))
    until(lambda: "asked" in rules(table), "the rule")
    os.kill(supervisor_of(picker.child.pid), signal.SIGKILL)
    known: set[object] = set()
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        known.add(rules(table).get("asked"))
        time.sleep(0.005)
    assert known == {("canary", "one")}
    world.kube.apply(rewrite(world.space, "canary", "asked", {"two": 1}))
    until(lambda: rules(table)["asked"] == ("canary", "two"), "the successor follows")
