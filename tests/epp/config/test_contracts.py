from collections.abc import Sequence
from typing import Any

import pytest

from epp.config import contracts
from epp.config.contracts import STAGES
from epp.data import INFLIGHT_REQUESTS, KV_USAGE, WAITING, Column, Datum, Key
from epp.metrics import Metric
from epp.plugin import (
    Admitter,
    DataProducer,
    Decider,
    Extractor,
    Filter,
    NoParams,
    Picker,
    Plugin,
    PreRequest,
    ProfileHandler,
    RequestHeader,
    ResponseComplete,
    Scorer,
    Screener,
)
from tests.cases import cases


def make(kind: type[Plugin], name: str, *, reads: Sequence[Key[Any]] = (), emits: Sequence[Key[Any]] = ()) -> Any:
    plugin = kind(name, NoParams())
    plugin.consumes, plugin.produces = reads, emits
    return plugin


def datum(name: str, kind: type[Any] = int) -> Datum[Any]:
    return Datum(name, kind)


class Hooked(DataProducer, PreRequest):
    pass


SCRAPE = make(Extractor, "scrape", emits=(WAITING, KV_USAGE))


def breaches(*plugins: Plugin) -> list[tuple[str, str]]:
    return [(breach.plugin, breach.rule) for breach in contracts.check(plugins).breaches]


def test_columns_are_the_sorted_union_of_all_reads() -> None:
    readers = [make(Scorer, "a", reads=(WAITING,)), make(Scorer, "b", reads=(KV_USAGE, WAITING, INFLIGHT_REQUESTS))]
    checked = contracts.check([SCRAPE, *readers])
    assert checked.columns == (INFLIGHT_REQUESTS, KV_USAGE, WAITING)
    assert checked.breaches == ()


def test_a_column_that_no_extractor_produces_is_an_error_with_its_reader_and_a_hint() -> None:
    (breach,) = contracts.check([SCRAPE, make(Scorer, "a", reads=(Column("waiting_request", int),))]).breaches
    assert breach.rule == "no-producer"
    assert breach.message == "'a' (type Scorer, epp.plugin) reads 'waiting_request', which no extractor of this configuration produces"
    assert breach.hint == "did you mean 'waiting_requests'?"


def test_a_datum_that_no_plugin_produces_is_an_error_even_if_a_column_has_its_name() -> None:
    assert breaches(SCRAPE, make(Scorer, "a", reads=(datum(WAITING.name),))) == [("a", "no-producer")]


def test_a_plugin_that_declares_a_datum_but_is_no_producer_does_not_produce_it() -> None:
    assert breaches(make(Scorer, "a", reads=(datum("x"),), emits=(datum("x"),))) == [("a", "no-producer")]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (Column("waiting_requests", float), ("as float", "as int")),
        (Column("waiting_requests", int, worst="low"), ("worst='low'", "worst='high'")),
        (Column("inflight_requests", float), ("as float, but the picker produces it", "as int")),
    ],
)
def test_reader_and_producer_must_agree_on_the_type(key: Column[Any], words: tuple[str, str]) -> None:
    (breach,) = contracts.check([SCRAPE, make(Scorer, "a", reads=(key,))]).breaches
    assert breach.rule == "type-clash"
    assert all(word in breach.message for word in words)


def test_one_key_has_one_producer() -> None:
    second = make(Extractor, "again", emits=(WAITING,))
    (breach,) = contracts.check([SCRAPE, second]).breaches
    assert (breach.plugin, breach.rule) == ("again", "two-producers")
    assert (
        "'again' (type Extractor, epp.plugin) and 'scrape' (type Extractor, epp.plugin) both produce 'waiting_requests'" in breach.message
    )


def test_a_plugin_must_not_produce_what_the_picker_counts() -> None:
    assert breaches(make(Extractor, "e", emits=(INFLIGHT_REQUESTS,))) == [("e", "two-producers")]


def test_a_producer_may_declare_the_same_key_twice() -> None:
    assert breaches(make(DataProducer, "p", emits=(datum("x"), datum("x")))) == []


def test_producers_run_after_the_producers_that_they_read_and_otherwise_in_configured_order() -> None:
    last = make(DataProducer, "last", reads=(datum("b"), datum("a")), emits=(datum("c"),))
    a = make(DataProducer, "a", emits=(datum("a"),))
    other = make(DataProducer, "other", emits=(datum("o"),))
    b = make(DataProducer, "b", reads=(datum("a"),), emits=(datum("b"),))
    checked = contracts.check([last, other, b, a])
    assert [producer.name for producer in checked.producers] == ["other", "a", "b", "last"]
    assert checked.breaches == ()


def test_a_cycle_names_exactly_the_producers_that_wait_for_each_other() -> None:
    waits = make(DataProducer, "waits", reads=(datum("a"),))
    a = make(DataProducer, "a", reads=(datum("b"),), emits=(datum("a"),))
    b = make(DataProducer, "b", reads=(datum("a"),), emits=(datum("b"),))
    (breach,) = contracts.check([waits, a, b]).breaches
    assert (breach.plugin, breach.rule) == ("a", "producer-cycle")
    where = "(type DataProducer, epp.plugin)"
    assert breach.message == (
        f"data producers wait for each other: 'a' {where} reads 'b' of 'b' {where}, 'b' {where} reads 'a' of 'a' {where}"
    )


def test_a_producer_that_reads_its_own_data_is_a_cycle() -> None:
    assert breaches(make(DataProducer, "p", reads=(datum("x"),), emits=(datum("x"),))) == [("p", "producer-cycle")]


def test_unread_producers_include_those_that_only_unread_producers_read() -> None:
    first = make(DataProducer, "first", emits=(datum("a"),))
    second = make(DataProducer, "second", reads=(datum("a"),), emits=(datum("b"),))
    hooked = make(Hooked, "hooked", emits=(datum("c"),))
    read = make(DataProducer, "read", emits=(datum("d"),))
    plugins = [first, second, hooked, read, make(Scorer, "s", reads=(datum("d"),))]
    assert [plugin.name for plugin in contracts.unread(plugins)] == ["second", "first"]


def test_missing_data_are_sorted_by_name() -> None:
    plugins = [make(Scorer, "s", reads=(datum("z"), datum("b"), datum("a"), WAITING)), make(DataProducer, "p", emits=(datum("a"),))]
    assert [key.name for key in contracts.missing(plugins)] == ["b", "z"]


def test_an_instance_is_described_with_its_type_if_its_name_differs() -> None:
    class Named(Scorer):
        type_name = "named-scorer"

    assert contracts.described(make(Named, "named-scorer")) == f"'named-scorer' ({__name__})"
    assert contracts.described(make(Named, "mine")) == f"'mine' (type named-scorer, {__name__})"


def test_a_data_producer_does_not_produce_columns() -> None:
    producer = make(DataProducer, "p", emits=(KV_USAGE,))
    assert breaches(producer, make(Scorer, "s", reads=(KV_USAGE,))) == [("s", "no-producer")]


# The order of stages

ORDER = (RequestHeader, Screener, DataProducer, Admitter, ProfileHandler, Decider, Filter, Scorer, Picker, PreRequest, ResponseComplete)


def test_stages_are_listed_in_the_order_in_which_they_run() -> None:
    assert [kind for kinds in STAGES for kind in kinds if kind in ORDER] == list(ORDER)


@cases("emitter", [RequestHeader, DataProducer, ProfileHandler])
@cases("reader", ORDER)
def test_a_datum_may_be_read_from_its_producer_s_stage_on(emitter: type[Plugin], reader: type[Plugin]) -> None:
    stage = {kind: number for number, kinds in enumerate(STAGES) for kind in kinds}
    found = breaches(make(emitter, "emits", emits=(datum("x"),)), make(reader, "reads", reads=(datum("x"),)))
    assert found == ([] if stage[reader] >= stage[emitter] else [("reads", "stage-order")])


def test_a_read_before_the_producer_is_an_error_with_both_plugins() -> None:
    producer, screener = make(DataProducer, "late", emits=(datum("x"),)), make(Screener, "early", reads=(datum("x"),))
    (breach,) = contracts.check([producer, screener]).breaches
    assert breach.message == ("'early' (type Screener, epp.plugin) reads 'x' before 'late' (type DataProducer, epp.plugin) produces it")


def test_a_plugin_with_several_stages_reads_in_the_last_and_produces_in_the_first() -> None:
    class Screens(Screener, PreRequest):
        pass

    class Reads(RequestHeader, DataProducer):
        pass

    assert breaches(make(DataProducer, "p", emits=(datum("x"),)), make(Screens, "s", reads=(datum("x"),))) == []
    assert breaches(make(Reads, "r", emits=(datum("x"),)), make(Screener, "s", reads=(datum("x"),))) == []


def test_two_producers_of_one_datum_are_an_error_for_all_kinds_of_producers() -> None:
    plugins = [make(kind, kind.__name__, emits=(datum("x"),)) for kind in (RequestHeader, DataProducer, ProfileHandler)]
    assert breaches(*plugins) == [("DataProducer", "two-producers"), ("ProfileHandler", "two-producers")]


def test_reader_and_producer_must_agree_on_whether_a_datum_is_per_profile() -> None:
    producer = make(DataProducer, "p", emits=(Datum("x", int, per_profile=True),))
    (breach,) = contracts.check([producer, make(Scorer, "s", reads=(datum("x"),))]).breaches
    assert (breach.plugin, breach.rule) == ("s", "type-clash")
    assert "reads 'x' as per request" in breach.message
    assert "produces it as per profile" in breach.message
    assert breaches(producer, make(Scorer, "s", reads=(Datum("x", int, per_profile=True),))) == []


def test_a_longer_cycle_is_found_beside_other_producers() -> None:
    ring = [make(DataProducer, str(i), reads=(datum(str((i + 1) % 4)),), emits=(datum(str(i)),)) for i in range(4)]
    beside = make(DataProducer, "beside", emits=(datum("free"),))
    checked = contracts.check([beside, *ring])
    assert [producer.name for producer in checked.producers] == ["beside"]
    assert [breach.rule for breach in checked.breaches] == ["producer-cycle"]


# Optional data


def optional(kind: type[Plugin], name: str, *keys: Datum[Any]) -> Any:
    plugin = make(kind, name)
    plugin.optional = keys
    return plugin


def test_an_optional_datum_need_not_be_produced_and_adds_no_default_producer() -> None:
    reader = optional(Scorer, "s", datum("x"))
    assert breaches(reader) == []
    assert contracts.missing([reader]) == []


def test_an_optional_datum_that_is_produced_must_follow_the_rules() -> None:
    producer = make(DataProducer, "p", emits=(datum("x"),))
    assert breaches(producer, optional(Scorer, "s", datum("x"))) == []
    assert breaches(producer, optional(Scorer, "s", datum("x", str))) == [("s", "type-clash")]
    assert breaches(producer, optional(Screener, "s", datum("x"))) == [("s", "stage-order")]


def test_an_optional_reader_keeps_the_producer_and_runs_after_it() -> None:
    producer, reader = make(DataProducer, "p", emits=(datum("x"),)), optional(DataProducer, "r", datum("x"))
    reader.produces = (datum("y"),)
    plugins = [reader, producer, make(Scorer, "s", reads=(datum("y"),))]
    assert contracts.unread(plugins) == []
    assert [p.name for p in contracts.check(plugins).producers] == ["p", "r"]


def test_two_plugins_must_not_declare_different_metrics_with_the_same_name() -> None:
    fetches = Metric("fetches_total", "counter", "Fetches.")

    class One(Scorer):
        metrics = (fetches,)

    class Same(Scorer):
        metrics = (fetches,)

    class Other(Scorer):
        metrics = (fetches._replace(labels=("result",)),)

    assert breaches(One("a", NoParams()), One("b", NoParams()), Same("c", NoParams())) == []
    assert breaches(One("a", NoParams()), Other("b", NoParams())) == [("b", "metric-clash")]
