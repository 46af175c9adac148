"""Rewrite rules in a worker: in force for the next request, decoded once per version, and counted."""

import random

import pytest

from epp.metrics.label_caps import LabelCaps
from epp.metrics.request_series import MODEL_REWRITES, REQUEST
from epp.request.model_rewrite import Rewrite, Rule, Rules, Target, compiled
from shm.documents import DocumentReader, DocumentSchema, DocumentWriter
from shm.segment import Region
from shm.series import SeriesWriter
from shm.series_reader import SeriesReader
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
        self.schema = series_schema_of(MODEL_REWRITES, areas=1)
        self.region = region_for(self.schema)
        self.caps = LabelCaps()
        decisions = SeriesWriter(self.schema, self.schema.area(self.region, 0), names=self.caps.names(MODEL_REWRITES.labels))
        self.view = RewritesView(reader, decisions, self.caps, random.Random(3).random)

    def write(self, *given: Rewrite) -> None:
        self.writer.write(REWRITES, rewrites.encode(compiled(given)))

    def rewrite(self, model: str) -> str | None:
        """Returns the model to request instead, for a request that comes now."""
        rewriting = self.view.present()
        assert rewriting is not None
        return rewriting(model)

    def decisions(self) -> dict[tuple[str, ...], int]:
        rows = SeriesReader(self.schema, self.region, serving=lambda _: True).rows()
        return {labels: int(values.counters[0]) for labels, values in rows.items()}


def rule(*targets: str, models: tuple[str, ...] | None = None) -> Rule:
    return Rule(models, tuple(map(Target, targets)))


def test_a_request_finds_the_rules_that_were_published_before_it() -> None:
    world = World()
    assert world.view.present() is None
    world.write(Rewrite("r", None, (rule("x"),)))
    assert world.rewrite("a") == "x"
    world.write(Rewrite("r", None, (rule("y"),)))
    assert world.rewrite("a") == "y"
    world.write()
    assert world.view.present() is None


def test_a_model_without_a_rule_keeps_its_name() -> None:
    world = World()
    world.write(Rewrite("r", None, (rule("x", models=("a",)),)))
    assert (world.rewrite("a"), world.rewrite("b")) == ("x", None)


def test_a_version_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = list[bytes]()

    def counted(blob: bytes) -> Rules:
        decoded.append(blob)
        return compiled(())

    monkeypatch.setattr(rewrites, "decode", counted)
    world = World()
    world.view.look()
    world.write()
    for _ in range(3):
        world.view.present()
        world.view.look()
    assert len(decoded) == 1


def test_requests_try_an_unreadable_version_once_and_keep_the_rules_and_heartbeats_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, tries = World(), list[int]()
    world.write(Rewrite("r", None, (rule("x"),)))
    assert world.rewrite("a") == "x"

    def unreadable(_reader: DocumentReader, index: int) -> None:
        tries.append(index)

    with monkeypatch.context() as patched:
        patched.setattr(DocumentReader, "read", unreadable)
        world.write(Rewrite("r", None, (rule("y"),)))
        assert [world.rewrite("a") for _ in range(3)] == ["x"] * 3
        assert len(tries) == 1
    world.view.look()
    assert world.rewrite("a") == "y"


def test_decisions_are_counted_by_rewrite_and_both_models_even_if_the_name_stays() -> None:
    world = World()
    world.write(Rewrite("r", None, (rule("x", "y", models=("a",)), rule("b", models=("b",)))), Rewrite("s", None, (rule("z"),)))
    for _ in range(40):
        world.rewrite("a")
    for model in ("b", "c", "c"):
        world.rewrite(model)
    decisions = world.decisions()
    assert decisions[("r", "a", "x")] + decisions[("r", "a", "y")] == 40
    assert decisions[("r", "a", "x")] and decisions[("r", "a", "y")]
    assert (decisions[("r", "b", "b")], decisions[("s", "other", "z")]) == (1, 2)


def test_models_of_rules_keep_their_labels_even_if_clients_request_very_many_models() -> None:
    world = World()
    world.write(Rewrite("r", None, (rule("x", models=("a",)), rule("y"))))
    world.caps.served("first", "y", "")
    for model in ("first", "second", "third", "a"):
        world.rewrite(model)
    assert world.decisions() == {("r", "first", "y"): 1, ("r", "other", "y"): 2, ("r", "a", "x"): 1}
    assert world.caps.names(REQUEST.labels).fold(("a", "x", "f", "0"))[:2] == ("a", "x")
