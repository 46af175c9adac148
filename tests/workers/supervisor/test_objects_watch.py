"""Publishing objectives and rewrites in the documents: from both sources, at start, later, and by a successor."""

from collections.abc import Mapping
from pathlib import Path

from epp.request.model_rewrite import Rewrite, Rule, Rules, Target
from shm.documents import DocumentReader, DocumentSchema, DocumentWriter
from shm.segment import Region
from tests.reports import Reports
from tests.shm.memory import region_for
from tests.workers.shared.test_objectives import objective
from tests.workers.supervisor.folders import FolderWatch
from workers.shared.documents import OBJECTIVES, REWRITES
from workers.shared.objectives import decode
from workers.supervisor.kube.object_kinds import OBJECTIVE, REWRITE, Found, ModelRewrite, Objective, PoolName
from workers.worker import rewrites

POOL = PoolName("pool")


class World:
    """Documents, a directory, and watches of successive supervisors."""

    def __init__(self, folder: Path, *, rewrites_bytes: int = 4000) -> None:
        schema = DocumentSchema((8, 8, 4000, rewrites_bytes))
        self.region: Region = region_for(schema)
        self.writer, self.reader = DocumentWriter(schema, self.region), DocumentReader(schema, self.region)
        self.folder = folder
        self.reports = Reports()

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def watch(self, *, api: bool = False, files: bool = True, successor: bool = False) -> FolderWatch:
        folder = str(self.folder) if files else ""
        report, now = self.reports, lambda: 0.0
        watch = FolderWatch(folder, self.reader, self.writer, (), None, report=report, now=now, pool=POOL, api=api)
        watch.start(successor=successor)
        return watch

    def priorities(self) -> Mapping[str, int]:
        found = self.reader.read(OBJECTIVES)
        assert found is not None
        return decode(found[1]).priorities

    def targets(self) -> dict[str, str]:
        """The target of each model; "" stands for all other models."""
        found = self.reader.read(REWRITES)
        rules = rewrites.decode(found[1]) if found is not None else Rules()
        return {model: choice.models[0] for model in (*rules.exact, "") if (choice := rules.choice(model)) is not None}


def rewrite(name: str, model: str, target: str) -> str:
    rule = f"{{matches: [{{model: {{value: {model}}}}}], targets: [{{modelRewrite: {target}}}]}}"
    return f"{{apiVersion: llm-d.ai/v1alpha2, kind: InferenceModelRewrite, metadata: {{name: {name}}}, spec: {{rules: [{rule}]}}}}"


def api_objects(priorities: Mapping[str, int] = {}, **targets: str) -> Found:
    """Objects of an API server: objectives with these priorities, and a rewrite per model."""
    rewrites = {m: Rewrite(m, 1.0, (Rule((m,), (Target(t),)),)) for m, t in targets.items()}
    return Found(
        {name: Objective(name, priority, 0, (POOL,), f"ns/{name}") for name, priority in priorities.items()},
        {name: ModelRewrite(name, each, 0, (POOL,), f"ns/{name}") for name, each in rewrites.items()},
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


def test_both_sources_are_merged_and_the_directory_wins_a_name(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write("a.yaml", objective("o", 1) + "\n---\n" + rewrite("a", "a", "from-the-file"))
    watch = world.watch(api=True)
    assert world.priorities() == {"o": 1} and world.targets() == {"a": "from-the-file"}
    watch.set_api_objects(api_objects({"o": 2, "p": 3}, a="from-the-api", b="y"), True)
    assert world.priorities() == {"o": 1, "p": 3}
    assert world.targets() == {"a": "from-the-file", "b": "y"}
    assert sum("is in the directory and in Kubernetes" in report for report in world.reports) == 2
    (tmp_path / "a.yaml").unlink()
    watch.look()
    assert world.priorities() == {"o": 2, "p": 3} and world.targets() == {"a": "from-the-api", "b": "y"}
    watch.set_api_objects(api_objects(), True)
    assert world.priorities() == {} and world.targets() == {}


def test_the_directory_is_followed_while_the_api_is_away(tmp_path: Path) -> None:
    world = World(tmp_path)
    watch = world.watch(api=True)
    for target in ("x", "y"):
        world.write("r.yaml", rewrite("r", "a", target) + "\n---\n" + objective("o", len(target)))
        watch.look()
        assert world.targets() == {"a": target} and world.priorities() == {"o": 1}


def test_an_api_server_without_a_directory_is_enough(tmp_path: Path) -> None:
    world = World(tmp_path)
    watch = world.watch(api=True, files=False)
    watch.set_api_objects(api_objects({"o": 4}, a="x"), False)
    assert world.priorities() == {"o": 4} and world.targets() == {"a": "x"}


def test_a_successor_keeps_the_published_objects_until_every_source_has_answered(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write("a.yaml", objective("f", 1))
    world.watch(api=True).set_api_objects(api_objects({"o": 4, "gone": 5}, a="x", b="y"), True)
    successor = world.watch(api=True, successor=True)
    assert successor.expects == [OBJECTIVE, REWRITE]
    assert world.priorities() == {"f": 1, "o": 4, "gone": 5}
    assert world.targets() == {"a": "x", "b": "y"}
    successor.set_api_objects(api_objects({"o": 6, "new": 7}), False)
    assert world.priorities() == {"f": 1, "o": 6, "gone": 5, "new": 7}
    assert world.targets() == {"a": "x", "b": "y"}, "rules stay unchanged until all objects are known"
    successor.set_api_objects(api_objects({"o": 6, "new": 7}, b="z"), True)
    assert world.priorities() == {"f": 1, "o": 6, "new": 7}
    assert world.targets() == {"b": "z"}


def test_a_successor_does_not_expect_objects_of_the_directory_from_the_api(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write("a.yaml", objective("f", 1) + "\n---\n" + rewrite("r", "a", "x"))
    assert world.watch(api=True).expects == ()
    assert world.watch(api=True, successor=True).expects == []
    world.watch(api=True).set_api_objects(api_objects({"o": 4}), True)
    assert world.watch(api=True, successor=True).expects == [OBJECTIVE]


def test_a_successor_follows_the_sources_after_all_have_answered_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.watch(api=True).set_api_objects(api_objects({"o": 4}, a="x"), True)
    successor = world.watch(api=True, successor=True)
    successor.set_api_objects(api_objects({"p": 5}, b="y"), True)
    successor.set_api_objects(api_objects({}, c="z"), False)
    assert world.priorities() == {} and world.targets() == {"c": "z"}


def test_a_successor_with_a_bad_directory_keeps_all_objects_until_the_directory_is_good(tmp_path: Path) -> None:
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


def test_rules_that_are_too_large_are_reported_once_and_the_last_rules_stay(tmp_path: Path) -> None:
    world = World(tmp_path, rewrites_bytes=64)
    world.write("r.yaml", rewrite("r", "a", "x"))
    watch = world.watch()
    world.write("s.yaml", rewrite("s", "b", "y" * 100))
    for _ in range(3):
        watch.look()
    assert world.targets() == {"a": "x"}
    (report,) = world.reports
    assert "workers keep the last document document=model rewrites reason=document 3 has" in report


def test_rules_that_were_overwritten_are_written_again_although_there_are_none_now(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.write("r.yaml", rewrite("r", "a", "x"))
    world.watch()
    (tmp_path / "r.yaml").unlink()
    world.region.bytes[world.writer.schema.offsets[REWRITES] + 8 :] = b"\xff" * (
        world.region.size - world.writer.schema.offsets[REWRITES] - 8
    )
    assert world.writer.repair() == [REWRITES]
    world.watch(successor=True)
    found = world.reader.read(REWRITES)
    assert found is not None and not rewrites.decode(found[1]).choices
    assert world.writer.repair() == []
