"""The document with the models of several pools: bounded, and readable while it changes."""

from epp.protocol.models import Model
from shm.documents import DocumentReader, DocumentSchema, DocumentWriter
from tests.shm.memory import region_for
from workers.shared.documents import ServedView, encode, fitting, models_of


def models(*names: str) -> list[Model]:
    return [Model(name) for name in names]


def test_all_models_fit_if_there_is_room() -> None:
    served = {0: models("a", "b"), 3: [Model("c", "root", "a", 4096)]}
    assert fitting(served, 1000) == served


def test_a_pool_with_many_models_leaves_room_for_the_others() -> None:
    many = models(*(f"adapter-{number:04}" for number in range(1000)))
    shown = fitting({0: many, 1: models("a"), 2: many}, 2000)
    assert shown[1] == models("a")
    assert len(encode(shown)) <= 2000
    assert 50 < len(shown[0]) < 1000 and abs(len(shown[0]) - len(shown[2])) <= 1
    assert shown[0] == many[: len(shown[0])]


def test_nothing_fits_into_no_room() -> None:
    assert fitting({0: models("a")}, 20) == {0: []}


def test_a_reader_has_the_models_of_the_last_document_that_it_could_read() -> None:
    schema = DocumentSchema((1,) * models_of(2) + (1000,))
    region = region_for(schema)
    writer, view = DocumentWriter(schema, region), ServedView(DocumentReader(schema, region), 2)
    assert view.current() == {} and view.version == 0
    writer.write(models_of(2), encode({1: [Model("a", "org/a", "", 8)]}))
    assert view.current() == {1: [Model("a", "org/a", "", 8)]}
    before = view.version
    writer.write(models_of(2), encode({}))
    assert view.current() == {} and view.version > before
