"""Rewrite rules in a worker: decoded once per version, counted, and without any cost while there are none."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from epp.intake import Intake
from epp.metrics.label_caps import LabelCaps
from epp.metrics.series import MODEL_REWRITES, REQUEST
from epp.model_rewrite import Rewrite, Rule, Rules, Target, compiled
from shm.documents import DocumentReader, DocumentSchema, DocumentWriter
from shm.segment import Region
from shm.series import SeriesReader, SeriesWriter
from tests.shm.memory import region_for
from workers.process.layout import series_schema_of
from workers.shared.documents import REWRITES
from workers.worker import rewrites
from workers.worker.rewrites import RewritesView


class World:
    """A document, and one worker that reads it."""

    def __init__(self) -> None:
        schema = DocumentSchema((8, 8, 8, 4000))
        region: Region = region_for(schema)
        self.writer, reader = DocumentWriter(schema, region), DocumentReader(schema, region)
        self.schema = series_schema_of(MODEL_REWRITES, lanes=1)
        self.region = region_for(self.schema)
        self.caps = LabelCaps(models_max=1)
        decisions = SeriesWriter(self.schema, self.schema.lane(self.region, 0), fold=self.caps.fold(MODEL_REWRITES))
        self.view = RewritesView(reader, decisions, self.caps, random.Random(3).random)
        self.app: Any = SimpleNamespace(intake=Intake())

    def write(self, *given: Rewrite) -> None:
        self.writer.write(REWRITES, rewrites.encode(compiled(given)))

    def follow(self) -> None:
        if self.view.look():
            self.app.intake.rewrite = self.view.rewrite

    def decisions(self) -> dict[tuple[str, ...], int]:
        rows = SeriesReader(self.schema, self.region, serving=lambda _: True).rows()
        return {labels: int(values.counters[0]) for labels, values in rows.items()}


def rule(*targets: str, models: tuple[str, ...] | None = None) -> Rule:
    return Rule(models, tuple(map(Target, targets)))


def test_requests_do_no_work_for_rewrites_while_there_are_no_rules() -> None:
    world = World()
    world.follow()
    assert world.app.intake.rewrite is None
    world.write(Rewrite("r", None, (rule("x"),)))
    world.follow()
    assert world.app.intake.rewrite("a") == "x"
    world.write()
    world.follow()
    assert world.app.intake.rewrite is None


def test_a_model_without_a_rule_keeps_its_name() -> None:
    world = World()
    world.write(Rewrite("r", None, (rule("x", models=("a",)),)))
    world.follow()
    assert (world.app.intake.rewrite("a"), world.app.intake.rewrite("b")) == ("x", None)


def test_a_version_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world, decoded = World(), list[bytes]()

    def counted(blob: bytes) -> Rules:
        decoded.append(blob)
        return compiled(())

    monkeypatch.setattr(rewrites, "decode", counted)
    assert not world.view.look()
    world.write()
    assert world.view.look()
    assert not world.view.look()
    assert len(decoded) == 1


def test_decisions_are_counted_by_rewrite_and_both_models_even_if_the_name_stays() -> None:
    world = World()
    world.write(
        Rewrite("r", None, (rule("x", "y", models=("a",)), rule("b", models=("b",)))), Rewrite("s", None, (rule("z"),))
    )
    world.follow()
    for _ in range(40):
        world.app.intake.rewrite("a")
    for model in ("b", "c", "c"):
        world.app.intake.rewrite(model)
    decisions = world.decisions()
    assert decisions[("r", "a", "x")] + decisions[("r", "a", "y")] == 40
    assert decisions[("r", "a", "x")] and decisions[("r", "a", "y")]
    assert (decisions[("r", "b", "b")], decisions[("s", "c", "z")]) == (1, 2)


def test_models_of_rules_keep_their_labels_even_if_clients_request_very_many_models() -> None:
    world = World()
    world.write(Rewrite("r", None, (rule("x", models=("a",)), rule("y"))))
    world.follow()
    for model in ("first", "second", "third", "a"):
        world.app.intake.rewrite(model)
    assert world.decisions() == {("r", "first", "y"): 1, ("r", "other", "y"): 2, ("r", "a", "x"): 1}
    assert world.caps.fold(REQUEST)(("a", "x", "f", "0"))[:2] == ("a", "x")
