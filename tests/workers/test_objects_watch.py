"""Objectives and rewrites on their way into the documents: from both sources, at the start, later, and for a successor."""

from collections.abc import Mapping
from pathlib import Path

from epp.model_rewrite import Rewrite, Rule, Rules, Target
from shm.documents import DocumentReader, DocumentSchema, DocumentWriter
from shm.segment import Region
from tests.shm.memory import region_for
from tests.workers.test_objectives import objective
from workers import rewrites
from workers.documents import OBJECTIVES, REWRITES
from workers.object_kinds import OBJECTIVE, REWRITE, Found, ModelRewrite, Objective, PoolName
from workers.objectives import decode
from workers.objects_watch import ObjectsWatch

POOL = PoolName("pool")


class World:
    """Documents, a directory and the supervisors that come one after another."""

    def __init__(self, folder: Path, *, rewrites_bytes: int = 4000) -> None:
        schema = DocumentSchema((8, 8, 4000, rewrites_bytes))
        region: Region = region_for(schema)
        self.writer, self.reader = DocumentWriter(schema, region), DocumentReader(schema, region)
        self.folder = folder
        self.reports: list[str] = []

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def watch(self, *, api: bool = False, files: bool = True, successor: bool = False) -> ObjectsWatch:
        folder = str(self.folder) if files else ""
        report, now = self.reports.append, lambda: 0.0
        watch = ObjectsWatch(folder, self.reader, self.writer, (), None, report=report, now=now, pool=POOL, api=api)
        watch.start(successor=successor)
        return watch

    def priorities(self) -> Mapping[str, int]:
        found = self.reader.read(OBJECTIVES)
        assert found is not None
        return decode(found[1]).priorities

    def targets(self) -> dict[str, str]:
        """By model; "" is any other one."""
        found = self.reader.read(REWRITES)
        rules = rewrites.decode(found[1]) if found is not None else Rules()
        others = rules.others()
        return {m: c.models[0] for m, c in rules.by_model().items()} | ({"": others.models[0]} if others else {})


def rewrite(name: str, model: str, target: str) -> str:
    rule = f"{{matches: [{{model: {{value: {model}}}}}], targets: [{{modelRewrite: {target}}}]}}"
    return f"{{apiVersion: llm-d.ai/v1alpha2, kind: InferenceModelRewrite, metadata: {{name: {name}}}, spec: {{rules: [{rule}]}}}}"


def told(priorities: Mapping[str, int] = {}, **targets: str) -> Found:
    """What an API server says: priorities, and a rule per model."""
    given = {m: Rewrite(m, 1.0, (Rule((m,), (Target(t),)),)) for m, t in targets.items()}
    return Found(
        {name: Objective(name, priority, 0, POOL, f"ns/{name}") for name, priority in priorities.items()},
        {name: ModelRewrite(name, each, 0, POOL, f"ns/{name}") for name, each in given.items()},
    )


def test_rules_of_the_directory_are_followed(tmp_path: Path) -> None:
    world = World(tmp_path)
    watch = world.watch()
    assert world.reader.version(REWRITES) == 0
    world.write("r.yaml", rewrite("r", "a", "x"))
    watch.look()
    assert world.targets() == {"a": "x"}
    version = world.reader.version(REWRITES)
    watch.look()
    assert world.reader.version(REWRITES) == version
    (tmp_path / "r.yaml").unlink()
    watch.look()
    assert world.targets() == {}


def test_both_sources_come_together_and_the_directory_wins_a_name(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write("a.yaml", objective("o", 1) + "\n---\n" + rewrite("a", "a", "of-the-file"))
    watch = world.watch(api=True)
    assert world.priorities() == {"o": 1} and world.targets() == {"a": "of-the-file"}
    watch.told(told({"o": 2, "p": 3}, a="of-the-api", b="y"), True)
    assert world.priorities() == {"o": 1, "p": 3}
    assert world.targets() == {"a": "of-the-file", "b": "y"}
    assert sum("is in the directory and in Kubernetes" in report for report in world.reports) == 2
    (tmp_path / "a.yaml").unlink()
    watch.look()
    assert world.priorities() == {"o": 2, "p": 3} and world.targets() == {"a": "of-the-api", "b": "y"}
    watch.told(told(), True)
    assert world.priorities() == {} and world.targets() == {}


def test_while_the_api_is_away_the_directory_is_followed(tmp_path: Path) -> None:
    world = World(tmp_path)
    watch = world.watch(api=True)
    for target in ("x", "y"):
        world.write("r.yaml", rewrite("r", "a", target) + "\n---\n" + objective("o", len(target)))
        watch.look()
        assert world.targets() == {"a": target} and world.priorities() == {"o": 1}


def test_an_api_without_a_directory_is_enough(tmp_path: Path) -> None:
    world = World(tmp_path)
    watch = world.watch(api=True, files=False)
    watch.told(told({"o": 4}, a="x"), False)
    assert world.priorities() == {"o": 4} and world.targets() == {"a": "x"}


def test_a_successor_keeps_what_was_known_until_every_source_has_spoken(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write("a.yaml", objective("f", 1))
    world.watch(api=True).told(told({"o": 4, "gone": 5}, a="x", b="y"), True)
    successor = world.watch(api=True, successor=True)
    assert successor.expects == [OBJECTIVE, REWRITE]
    assert world.priorities() == {"f": 1, "o": 4, "gone": 5}
    assert world.targets() == {"a": "x", "b": "y"}
    successor.told(told({"o": 6, "new": 7}), False)
    assert world.priorities() == {"f": 1, "o": 6, "gone": 5, "new": 7}
    assert world.targets() == {"a": "x", "b": "y"}, "rules stay as they are until all is heard"
    successor.told(told({"o": 6, "new": 7}, b="z"), True)
    assert world.priorities() == {"f": 1, "o": 6, "new": 7}
    assert world.targets() == {"b": "z"}


def test_a_successor_expects_nothing_of_the_api_that_the_directory_has(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write("a.yaml", objective("f", 1) + "\n---\n" + rewrite("r", "a", "x"))
    assert world.watch(api=True).expects == ()
    assert world.watch(api=True, successor=True).expects == []
    world.watch(api=True).told(told({"o": 4}), True)
    assert world.watch(api=True, successor=True).expects == [OBJECTIVE]


def test_a_successor_that_has_heard_all_once_believes_what_it_hears(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.watch(api=True).told(told({"o": 4}, a="x"), True)
    successor = world.watch(api=True, successor=True)
    successor.told(told({"p": 5}, b="y"), True)
    successor.told(told({}, c="z"), False)
    assert world.priorities() == {} and world.targets() == {"c": "z"}


def test_a_successor_with_a_bad_directory_keeps_all_and_follows_it_once_it_is_good(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write("a.yaml", objective("f", 1) + "\n---\n" + rewrite("r", "a", "x"))
    world.watch()
    missing = tmp_path.rename(tmp_path.with_suffix(".away"))
    successor = world.watch(successor=True)
    assert world.priorities() == {"f": 1} and world.targets() == {"a": "x"}
    missing.rename(tmp_path)
    world.write("a.yaml", objective("f", 2))
    successor.look()
    assert world.priorities() == {"f": 2} and world.targets() == {}


def test_rules_without_room_leave_the_last_ones_and_that_is_said_once(tmp_path: Path) -> None:
    world = World(tmp_path, rewrites_bytes=64)
    world.write("r.yaml", rewrite("r", "a", "x"))
    watch = world.watch()
    world.write("s.yaml", rewrite("s", "b", "y" * 100))
    for _ in range(3):
        watch.look()
    assert world.targets() == {"a": "x"}
    (report,) = world.reports
    assert "workers keep the last model rewrites: document 3 has" in report
