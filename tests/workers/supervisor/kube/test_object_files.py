"""Objectives and rewrites from files: which objects are read, which faults are reported, and which objects stay."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from epp.request.model_rewrite import MODEL_CHARS_MAX, MODELS_MAX, RULES_MAX, TARGETS_MAX, Rewrite, Rule, Target
from tests.reports import Reports
from workers.host.options import POOL_GROUP
from workers.host.yaml_files import DiscoveryError
from workers.supervisor.kube.object_files import FILES_MAX, Folder, parse_objects
from workers.supervisor.kube.object_kinds import Found, Objects, PoolName, merge

NEW = "llm-d.ai/v1alpha2"
OLD = "inference.networking.x-k8s.io/v1alpha2"


def objective(name: str = "a", priority: object = 1, group: str = NEW, more: str = "") -> str:
    return f"apiVersion: {group}\nkind: InferenceObjective\nmetadata:\n  name: {name}\nspec:\n  priority: {priority}\n{more}"


def merged(found: Found) -> Objects:
    return merge(found, Found(), lambda *_: None)


def priorities(found: Found) -> Mapping[str, int]:
    return merged(found).priorities


class Watched:
    """A folder, and the reports about it."""

    def __init__(self, path: Path, pool: str = "", group: str = POOL_GROUP) -> None:
        self.path = path
        self.reports = Reports()
        self.folder = Folder(str(path), self.reports, only=PoolName(pool, group))

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def load(self) -> Mapping[str, int]:
        return priorities(self.folder.load()[0])

    def reload(self) -> Mapping[str, int] | None:
        found = self.folder.reload()
        return None if found is None else priorities(found[0])

    def rewrites(self) -> list[Rewrite]:
        return list(merged(self.folder.load()[0]).rewrites)

    def faults(self) -> list[str]:
        with pytest.raises(DiscoveryError) as failed:
            self.folder.load()
        return [fault.replace(f"{self.path}/", "") for fault in failed.value.faults]


@pytest.fixture
def at(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_yaml_and_json_files_with_several_documents_of_both_groups_are_read(at: Watched) -> None:
    at.write("a.yaml", objective("a", 5) + "---\n" + objective("b", -1, OLD))
    at.write("b.yml", "---\n---\n" + objective("c", "+0"))
    in_json = {"apiVersion": NEW, "kind": "InferenceObjective", "metadata": {"name": "d"}, "spec": {"priority": 7}}
    at.write("c.json", json.dumps(in_json, indent="\t"))
    at.write("d.txt", "no objects")
    at.write(".hidden.yaml", "{")
    assert at.load() == {"a": 5, "b": -1, "c": 0, "d": 7}
    assert at.reports == []


def test_a_missing_priority_is_0(at: Watched) -> None:
    at.write("a.yaml", f"apiVersion: {NEW}\nkind: InferenceObjective\nmetadata: {{name: a}}\nspec: {{poolRef: {{name: p}}}}")
    at.write("b.yaml", f"apiVersion: {NEW}\nkind: InferenceObjective\nmetadata: {{name: b}}")
    assert at.load() == {"a": 0, "b": 0}


def test_aliases_and_merge_keys_count_as_what_they_stand_for(at: Watched) -> None:
    group = f"apiVersion: {NEW}\nkind: InferenceObjective\n"
    at.write("a.yaml", f"x: &x {{priority: 7}}\n{group}metadata: {{name: a}}\nspec: {{<<: *x}}\n")
    assert at.load() == {"a": 7}
    at.write("b.yaml", f"{group}metadata: {{name: *x}}\nspec: {{priority: 1}}\n")
    assert at.faults() == ["b.yaml:3: alias *x: no value before it has the anchor &x"]


def test_a_list_counts_as_its_items(at: Watched) -> None:
    items = "".join("- " + objective(name).replace("\n", "\n  ").rstrip() + "\n" for name in ("a", "b"))
    at.write("a.yaml", f"apiVersion: v1\nkind: List\nitems:\n{items}")
    assert at.load() == {"a": 1, "b": 1}


def test_the_newer_group_wins_for_an_objective_of_both_groups(at: Watched) -> None:
    at.write("a.yaml", objective("a", 1, NEW))
    at.write("b.yaml", objective("a", 2, OLD))
    assert at.load() == {"a": 1}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (objective("a", "high"), "o.yaml:6: InferenceObjective 'a': spec.priority: 'high' is not an integer from -2147483648"),
        (objective("a", 1 << 31), "o.yaml:6: InferenceObjective 'a': spec.priority: '2147483648' is not an integer from"),
        (objective("A b"), "o.yaml:4: InferenceObjective 'A b': metadata.name: a name has up to 253 lower-case letters"),
        (objective("a", group="llm-d.ai/v1"), "o.yaml:1: apiVersion 'llm-d.ai/v1': InferenceObjective needs llm-d.ai/v1alpha2 or"),
        (objective("a") + "---\n" + objective("a"), "o.yaml:8: InferenceObjective 'a' is given twice; first in"),
        ("- 1", "o.yaml:1: an object is a mapping with apiVersion, kind, metadata and spec"),
        ("kind: [a]", "o.yaml:1: kind must be one word, not a list or mapping"),
        (objective("a") + "---\n{", "o.yaml:9: neither YAML nor JSON"),
        (objective("a") + "---\nb: *x", "o.yaml:8: alias *x: no value before it has the anchor &x"),
        (objective("a").partition("spec")[0] + "spec: 5", "o.yaml:5: InferenceObjective 'a': spec must be a mapping"),
    ],
)  # fmt: skip
def test_a_fault_has_file_line_and_rule(at: Watched, text: str, fault: str) -> None:
    at.write("o.yaml", text)
    assert at.faults()[0].startswith(fault)


def test_all_faults_of_all_files_are_reported_at_once(at: Watched) -> None:
    at.write("a.yaml", objective("a", "x") + "---\n" + objective("b", "y"))
    at.write("b.yaml", objective("c", "z"))
    assert len(at.faults()) == 3


def test_a_missing_folder_is_refused_at_start_and_keeps_the_last_good_objects_later(tmp_path: Path) -> None:
    missing = Watched(tmp_path / "no")
    assert "cannot be read" in missing.faults()[0]
    missing.path.mkdir()
    missing.write("a.yaml", objective())
    assert missing.reload() == {"a": 1}
    (missing.path / "a.yaml").unlink()
    missing.path.rmdir()
    assert missing.reload() is None
    assert "the last good objects stay" in missing.reports[-1]


def test_a_file_that_becomes_bad_keeps_its_last_good_objects_and_is_reported_once(at: Watched) -> None:
    at.write("a.yaml", objective("a", 1))
    at.write("b.yaml", objective("b", 2))
    assert at.load() == {"a": 1, "b": 2}
    at.write("a.yaml", objective("a", "bad"))
    at.write("b.yaml", objective("b", 3))
    for _ in range(3):
        assert at.reload() == {"a": 1, "b": 3}
    assert len(at.reports) == 1
    assert at.reports[0].startswith("fault in an objects file file=")
    assert at.reports[0].endswith("the last good objects of this file stay")
    at.write("a.yaml", objective("a", 4))
    assert at.reload() == {"a": 4, "b": 3}
    (at.path / "b.yaml").unlink()
    assert at.reload() == {"a": 4}


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_file_that_is_suddenly_empty_keeps_its_last_good_objects_and_is_reported_once(at: Watched, text: str) -> None:
    at.write("a.yaml", objective("a", 1))
    at.write("b.yaml", text)
    assert at.load() == {"a": 1}
    at.write("a.yaml", text)
    for _ in range(3):
        assert at.reload() == {"a": 1}
    (report,) = at.reports
    assert "is empty now, as after a write that was cut off; remove the file to remove its objects" in report
    at.write("a.yaml", objective("a", 2))
    assert at.reload() == {"a": 2}
    at.write("a.yaml", "# no objects\n")
    assert at.reload() == {}


def test_each_other_kind_is_reported_once(at: Watched) -> None:
    pool = f"apiVersion: {NEW}\nkind: InferencePool\nmetadata: {{name: r}}\n"
    at.write("a.yaml", f"{pool}---\n{pool}---\n" + objective())
    assert at.load() == {"a": 1}
    at.folder.reload()
    assert len(at.reports) == 1
    assert "objects of kind InferencePool of llm-d.ai/v1alpha2 are not read here" in at.reports[0]


def test_an_objective_of_another_pool_is_left_out_if_the_pool_has_a_name(tmp_path: Path) -> None:
    pool = "  poolRef: {group: inference.networking.k8s.io, name: %s}\n"
    text = objective("a", 1, more=pool % "mine") + "---\n" + objective("b", 2, more=pool % "other")
    named, unnamed = Watched(tmp_path, "mine"), Watched(tmp_path)
    named.write("a.yaml", text)
    assert named.load() == {"a": 1}
    assert "'b' is for pool 'other', this is 'mine': it is left out" in named.reports[0]
    assert unnamed.load() == {"a": 1, "b": 2}


def test_too_many_files_are_refused(at: Watched) -> None:
    for number in range(FILES_MAX + 1):
        at.write(f"{number}.yaml", "")
    assert f"more than {FILES_MAX} files" in at.faults()[0]


def test_bytes_that_are_not_text_are_a_fault(at: Watched) -> None:
    (at.path / "a.yaml").write_bytes(b"\xff\xfe")
    assert at.faults() == ["a.yaml: not UTF-8 at byte 0"]


def test_documents_that_are_not_objects_do_not_stop_the_parser() -> None:
    for text in (b"5", b"[]", b"{}", b"null", b"a: [", b"items: []\nkind: List"):
        assert parse_objects(text, "f").objects == []


def rewrite(name: str = "r", rules: str = "[]", group: str = NEW, metadata: str = "", more: str = "") -> str:
    created = f", {metadata}" if metadata else ""
    return f"apiVersion: {group}\nkind: InferenceModelRewrite\nmetadata: {{name: {name}{created}}}\nspec:\n  rules: {rules}\n{more}"


RULES = """
  - matches:
    - model: {type: Exact, value: "asked"}
    - model: {value: older}
    targets:
    - {modelRewrite: base-v1, weight: 90}
    - {modelRewrite: base-v2, weight: 10}
  - targets: [{modelRewrite: base-v1}]
"""
ONE = "[{targets: [{modelRewrite: x}]}]"


def test_rewrites_of_both_groups_are_read_from_yaml_and_json_together_with_objectives(at: Watched) -> None:
    at.write("a.yaml", rewrite("a", RULES) + "---\n" + objective("o") + "---\n" + rewrite("b", "[]", OLD))
    document = {
        "apiVersion": NEW,
        "kind": "InferenceModelRewrite",
        "metadata": {"name": "c", "creationTimestamp": None},
        "spec": {"rules": [{"matches": [], "targets": [{"modelRewrite": "x", "weight": 1}]}]},
    }
    at.write("c.json", json.dumps(document))
    assert at.load() == {"o": 1}
    weighted = (Target("base-v1", 90), Target("base-v2", 10))
    assert at.rewrites() == [
        Rewrite("a", None, (Rule(("asked", "older"), weighted), Rule(None, (Target("base-v1"),)))),
        Rewrite("b", None, ()),
        Rewrite("c", None, (Rule(None, (Target("x", 1),)),)),
    ]
    assert at.reports == []


def test_rewrites_keep_their_creation_time_and_the_order_of_files_and_documents(at: Watched) -> None:
    at.write("b.yaml", rewrite("b"))
    at.write("a.yaml", rewrite("a2", metadata='creationTimestamp: "1970-01-01T01:00:10+01:00"') + "---\n" + rewrite("a1"))
    assert [(r.name, r.created) for r in at.rewrites()] == [("a2", 10.0), ("a1", None), ("b", None)]


def test_an_objective_and_a_rewrite_may_have_the_same_name(at: Watched) -> None:
    at.write("a.yaml", objective("a") + "---\n" + rewrite("a"))
    assert at.load() == {"a": 1}
    assert [r.name for r in at.rewrites()] == ["a"]


def test_the_newer_group_wins_for_a_rewrite_of_both_groups(at: Watched) -> None:
    at.write("a.yaml", rewrite("a", "[]", OLD) + "---\n" + rewrite("a", ONE, NEW))
    assert [len(r.rules) for r in at.rewrites()] == [1]


TO_X = "targets: [{modelRewrite: x}]"
LONG_NAME = "x" * (MODEL_CHARS_MAX + 1)
EMPTIES = [{}] * 2000


@pytest.mark.parametrize(
    ("rules", "fault"),
    [
        ("{}", "5: spec.rules must be a list"),
        ("null", "5: spec.rules: the list of rules is missing; write 'rules: []' if there are none"),
        ("[5]", "5: spec.rules[0]: a rule is a mapping with targets"),
        (f"[{{{TO_X}}}, {{}}]", "5: spec.rules[1]: no targets: name at least one model"),
        ("[{targets: []}]", "5: spec.rules[0]: no targets"),
        ("[{targets: {}}]", "5: spec.rules[0].targets must be a list"),
        ("[{targets: [5]}]", "5: spec.rules[0].targets[0] must be a mapping"),
        ("[{targets: [{}]}]", "5: spec.rules[0].targets[0].modelRewrite: nothing: a model's name has 1 to"),
        ('[{targets: [{modelRewrite: "a\\tb"}]}]', "5: spec.rules[0].targets[0].modelRewrite: 'a\tb': a model's name"),
        (f"[{{targets: [{{modelRewrite: {LONG_NAME}}}]}}]", "5: spec.rules[0].targets[0].modelRewrite: 'xxx"),
        ("\n  - targets:\n    - modelRewrite: x\n      weight: 0", "8: spec.rules[0].targets[0].weight: '0' is not an"),
        ("[{targets: [{modelRewrite: x, weight: -1}]}]", "5: spec.rules[0].targets[0].weight: '-1' is not an"),
        ("[{targets: [{modelRewrite: x, weight: 1000001}]}]", "5: spec.rules[0].targets[0].weight: '1000001' is not an"),
        ("[{targets: [{modelRewrite: x, weight: 1.5}]}]", "5: spec.rules[0].targets[0].weight: '1.5' is not an integer"),
        (f"[{{matches: [5], {TO_X}}}]", "5: spec.rules[0].matches[0]: a match is a mapping with the field model"),
        (f"[{{matches: [{{model: 5}}], {TO_X}}}]", "5: spec.rules[0].matches[0].model must be a mapping"),
        (f"[{{matches: [{{model: {{}}}}], {TO_X}}}]", "5: spec.rules[0].matches[0].model.value: nothing"),
        (f"[{{matches: [{{model: {{type: Regex, value: a}}}}], {TO_X}}}]", "5: spec.rules[0].matches[0].model.type: 'Regex'"),
        (str(EMPTIES[: RULES_MAX + 1]), f"5: spec.rules: more than {RULES_MAX}"),
        (f"[{{targets: {EMPTIES[: TARGETS_MAX + 1]}}}]", f"5: spec.rules[0].targets: more than {TARGETS_MAX}"),
        (f"[{{matches: {EMPTIES[: MODELS_MAX + 1]}}}]", f"5: spec.rules[0].matches: more than {MODELS_MAX}"),
    ],
)
def test_a_fault_in_a_rule_has_file_line_and_field(at: Watched, rules: str, fault: str) -> None:
    at.write("o.yaml", rewrite("a", rules))
    line, _, what = fault.partition(": ")
    assert at.faults()[0].startswith(f"o.yaml:{line}: InferenceModelRewrite 'a': {what}")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (rewrite("a").partition("spec")[0] + "spec: 5", "4: InferenceModelRewrite 'a': spec must be a mapping"),
        (rewrite("a").partition("spec")[0], "1: InferenceModelRewrite 'a': spec.rules: the list of rules is missing"),
        (rewrite("a", metadata="creationTimestamp: yesterday"), "3: InferenceModelRewrite 'a': metadata.creationTimestamp: 'yest"),
        (rewrite("a", metadata="creationTimestamp: 2026-01-31T12:00:00"), "3: InferenceModelRewrite 'a': metadata.creationTime"),
        (rewrite("a", more="  poolRef: 5\n"), "6: InferenceModelRewrite 'a': spec.poolRef must be a mapping"),
        (rewrite("a") + "---\n" + rewrite("a"), "7: InferenceModelRewrite 'a' is given twice; first in"),
        (rewrite("A b"), "3: InferenceModelRewrite 'A b': metadata.name: a name has up to 253"),
        (rewrite("a", group="llm-d.ai/v1"), "1: apiVersion 'llm-d.ai/v1': InferenceModelRewrite needs llm-d.ai/v1alpha2 or"),
    ],
)
def test_a_fault_in_a_rewrite_has_file_and_line(at: Watched, text: str, fault: str) -> None:
    at.write("o.yaml", text)
    assert at.faults()[0].startswith(f"o.yaml:{fault}")


def test_a_match_without_a_model_matches_nothing_and_is_reported_once(at: Watched) -> None:
    at.write("a.yaml", rewrite("a", "[{matches: [{}, {model: null}], targets: [{modelRewrite: x}]}]"))
    at.write("b.yaml", rewrite("b", "[{matches: [{}, {model: {value: m}}], targets: [{modelRewrite: x}]}]"))
    assert [r.rules[0].models for r in at.rewrites()] == [(), ("m",)]
    at.folder.reload()
    assert len(at.reports) == 1
    assert "a.yaml:1 reason=InferenceModelRewrite 'a': spec.rules[0] has matches, but none with a model" in at.reports[0]


def test_targets_that_are_never_chosen_are_reported_once(at: Watched) -> None:
    at.write("a.yaml", rewrite("a", "[{targets: [{modelRewrite: x}, {modelRewrite: y, weight: 5}]}]"))
    at.rewrites()
    at.folder.reload()
    assert len(at.reports) == 1
    text = "spec.rules[0] gives weights to some targets only: the targets without a weight are never chosen (x)"
    assert text in at.reports[0]


OLDER_POOLS = "inference.networking.x-k8s.io"


@pytest.mark.parametrize(
    ("reference", "group", "counts"),
    [
        ("{name: mine}", "inference.networking.k8s.io", True),
        ("{name: mine, group: inference.networking.k8s.io, kind: Anything}", "inference.networking.k8s.io", True),
        ("{name: mine}", OLDER_POOLS, False),
        (f"{{name: mine, group: {OLDER_POOLS}}}", "inference.networking.k8s.io", False),
        (f"{{name: mine, group: {OLDER_POOLS}}}", OLDER_POOLS, True),
        ('{name: mine, group: ""}', "inference.networking.k8s.io", False),
        ('{name: mine, group: ""}', "", True),
        ("{name: other}", "inference.networking.k8s.io", False),
    ],
)
def test_an_object_counts_for_the_pool_with_its_name_and_group(tmp_path: Path, reference: str, group: str, counts: bool) -> None:
    named, unnamed = Watched(tmp_path, "mine", group), Watched(tmp_path)
    ref = f"  poolRef: {reference}\n"
    named.write("a.yaml", rewrite("a", more=ref) + "---\n" + objective("o", more=ref))
    assert bool(named.rewrites()) is bool(named.load()) is counts
    assert len(named.reports) == (0 if counts else 2)
    assert counts or "InferenceModelRewrite 'a' is for pool 'mine'" in named.reports[0] or "'other'" in named.reports[0]
    assert len(unnamed.rewrites()) == len(unnamed.load()) == 1


def test_a_rewrite_that_becomes_bad_keeps_the_last_good_objects_of_its_file(at: Watched) -> None:
    at.write("a.yaml", rewrite("a", ONE) + "---\n" + objective("o", 3))
    at.load()
    at.write("a.yaml", rewrite("a", "[{}]") + "---\n" + objective("o", 4))
    assert at.reload() == {"o": 3}
    assert len(at.reports) == 1
    assert at.reports[0].endswith("name at least one model to use instead; the last good objects of this file stay")
