"""Objectives from files: what is read, what is wrong and where, what stays."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from workers.discovery import DiscoveryError
from workers.objects import FILES_MAX, Folder, parse_objects

NEW = "llm-d.ai/v1alpha2"
OLD = "inference.networking.x-k8s.io/v1alpha2"


def objective(name: str = "a", priority: object = 1, group: str = NEW, more: str = "") -> str:
    return f"apiVersion: {group}\nkind: InferenceObjective\nmetadata:\n  name: {name}\nspec:\n  priority: {priority}\n{more}"


class Watched:
    """A folder and what was reported of it."""

    def __init__(self, path: Path, pool: str = "") -> None:
        self.path = path
        self.reports: list[str] = []
        self.folder = Folder(str(path), self.reports.append, pool=pool)

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def load(self) -> Mapping[str, int]:
        return self.folder.load()

    def faults(self) -> list[str]:
        with pytest.raises(DiscoveryError) as failed:
            self.folder.load()
        return [fault.replace(f"{self.path}/", "") for fault in failed.value.faults]


@pytest.fixture
def at(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_several_documents_of_both_groups_in_yaml_and_json_are_read(at: Watched) -> None:
    at.write("a.yaml", objective("a", 5) + "---\n" + objective("b", -1, OLD))
    at.write("b.yml", "---\n---\n" + objective("c", "+0"))
    in_json = {"apiVersion": NEW, "kind": "InferenceObjective", "metadata": {"name": "d"}, "spec": {"priority": 7}}
    at.write("c.json", json.dumps(in_json, indent="\t"))
    at.write("d.txt", "no objects")
    at.write(".hidden.yaml", "{")
    assert at.load() == {"a": 5, "b": -1, "c": 0, "d": 7}
    assert at.reports == []


def test_a_priority_that_is_not_given_is_0(at: Watched) -> None:
    at.write(
        "a.yaml", f"apiVersion: {NEW}\nkind: InferenceObjective\nmetadata: {{name: a}}\nspec: {{poolRef: {{name: p}}}}"
    )
    at.write("b.yaml", f"apiVersion: {NEW}\nkind: InferenceObjective\nmetadata: {{name: b}}")
    assert at.load() == {"a": 0, "b": 0}


def test_a_list_counts_as_its_items(at: Watched) -> None:
    items = "".join("- " + objective(name).replace("\n", "\n  ").rstrip() + "\n" for name in ("a", "b"))
    at.write("a.yaml", f"apiVersion: v1\nkind: List\nitems:\n{items}")
    assert at.load() == {"a": 1, "b": 1}


def test_of_an_objective_of_both_groups_the_newer_counts(at: Watched) -> None:
    at.write("a.yaml", objective("a", 1, NEW))
    at.write("b.yaml", objective("a", 2, OLD))
    assert at.load() == {"a": 1}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (objective("a", "high"), "o.yaml:6: InferenceObjective 'a': spec.priority: 'high' is not an integer from -2147483648"),
        (objective("a", 1 << 31), "o.yaml:6: InferenceObjective 'a': spec.priority: '2147483648' is not an integer from"),
        (objective("A b"), "o.yaml:4: InferenceObjective 'A b': metadata.name: a name has up to 253 lower-case letters"),
        (objective("a", group="llm-d.ai/v1"), "o.yaml:1: apiVersion 'llm-d.ai/v1': InferenceObjective is of llm-d.ai/v1alpha2 or"),
        (objective("a") + "---\n" + objective("a"), "o.yaml:8: InferenceObjective 'a' is given twice; first in"),
        ("- 1", "o.yaml:1: an object is a mapping with apiVersion, kind, metadata and spec"),
        ("kind: [a]", "o.yaml:1: kind is one word, not a list or mapping"),
        (objective("a") + "---\n{", "o.yaml:9: neither YAML nor JSON"),
        (objective("a") + "---\na: &x 1\nb: *x", "o.yaml:9: alias *x: aliases are not supported"),
        (objective("a").partition("spec")[0] + "spec: 5", "o.yaml:5: InferenceObjective 'a': spec is a mapping"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_file_line_and_rule(at: Watched, text: str, fault: str) -> None:
    at.write("o.yaml", text)
    assert at.faults()[0].startswith(fault)


def test_all_faults_of_all_files_come_at_once(at: Watched) -> None:
    at.write("a.yaml", objective("a", "x") + "---\n" + objective("b", "y"))
    at.write("b.yaml", objective("c", "z"))
    assert len(at.faults()) == 3


def test_a_folder_that_is_not_there_is_refused_and_later_keeps_what_was_good(tmp_path: Path) -> None:
    missing = Watched(tmp_path / "no")
    assert "cannot be read" in missing.faults()[0]
    missing.path.mkdir()
    missing.write("a.yaml", objective())
    assert missing.folder.reload() == {"a": 1}
    (missing.path / "a.yaml").unlink()
    missing.path.rmdir()
    assert missing.folder.reload() is None
    assert "the last good objectives stay" in missing.reports[-1]


def test_later_a_bad_file_keeps_what_was_good_in_it_and_is_told_once(at: Watched) -> None:
    at.write("a.yaml", objective("a", 1))
    at.write("b.yaml", objective("b", 2))
    assert at.load() == {"a": 1, "b": 2}
    at.write("a.yaml", objective("a", "bad"))
    at.write("b.yaml", objective("b", 3))
    for _ in range(3):
        assert at.folder.reload() == {"a": 1, "b": 3}
    assert len(at.reports) == 1
    assert at.reports[0].endswith("what was last good there stays")
    at.write("a.yaml", objective("a", 4))
    assert at.folder.reload() == {"a": 4, "b": 3}
    (at.path / "b.yaml").unlink()
    assert at.folder.reload() == {"a": 4}


def test_other_kinds_are_named_once_each(at: Watched) -> None:
    rewrite = f"apiVersion: {NEW}\nkind: InferenceModelRewrite\nmetadata: {{name: r}}\n"
    at.write("a.yaml", f"{rewrite}---\n{rewrite}---\n" + objective())
    assert at.load() == {"a": 1}
    at.folder.reload()
    assert len(at.reports) == 1
    assert "objects of kind InferenceModelRewrite of llm-d.ai/v1alpha2 are not read here" in at.reports[0]


def test_an_objective_of_another_pool_is_left_out_where_the_pool_has_a_name(tmp_path: Path) -> None:
    pool = "  poolRef: {group: inference.networking.k8s.io, name: %s}\n"
    text = objective("a", 1, more=pool % "mine") + "---\n" + objective("b", 2, more=pool % "other")
    named, unnamed = Watched(tmp_path, "mine"), Watched(tmp_path)
    named.write("a.yaml", text)
    assert named.load() == {"a": 1}
    assert "'b' is for pool 'other', this is 'mine': it is left out" in named.reports[0]
    assert unnamed.load() == {"a": 1, "b": 2}


def test_more_files_than_anybody_needs_are_refused(at: Watched) -> None:
    for number in range(FILES_MAX + 1):
        at.write(f"{number}.yaml", "")
    assert f"more than {FILES_MAX} files" in at.faults()[0]


def test_bytes_that_are_no_text_are_a_fault(at: Watched) -> None:
    (at.path / "a.yaml").write_bytes(b"\xff\xfe")
    assert at.faults() == ["a.yaml: not UTF-8 at byte 0"]


def test_what_is_no_mapping_at_all_does_not_stop_the_parser() -> None:
    for text in (b"5", b"[]", b"{}", b"null", b"a: [", b"items: []\nkind: List"):
        assert parse_objects(text, "f").objectives == []
