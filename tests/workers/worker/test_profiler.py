"""Profiles of workers: question, samples, answer, and the pages that show them."""

import ctypes
import random
import signal
import sys
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from shm.areas import Areas, AreaSchema
from shm.documents import DocumentReader, DocumentWriter
from shm.segment import Region
from tests.examples import examples
from workers.shared.profiles import (
    DOCUMENT_BYTES,
    GRACE_S,
    LATE_S,
    SCALARS,
    SECONDS_MAX,
    Function,
    Profile,
    ProfileAnswering,
    ProfileAsking,
    Question,
    packed,
    schema,
    unpacked,
)
from workers.supervisor.pages.page import PageAnswer, Pause, Request
from workers.supervisor.pages.profile import BINARY, COLLAPSED, LEFT_OUT, NANOSECONDS, PPROF, ProfilePage, collapsed, pprof
from workers.worker.profiler import DEPTH_MAX, STACKS_MAX, Profiler, Sampler


class Site:
    """A supervisor and two workers in one process. `due` has what the event loop of a worker does later."""

    def __init__(self) -> None:
        area_schema = AreaSchema(4, SCALARS, (), (), areas=3)
        self.time = 1000.0
        self.areas = Areas(area_schema, Region(memoryview(bytearray(area_schema.bytes))))
        documents = schema(2)
        region = Region(memoryview(bytearray(documents.bytes)))
        for ordinal in (1, 2):
            self.areas.set_serving(ordinal, True)
        self.woken: list[int] = []
        self.due: list[tuple[float, Callable[[], None]]] = []
        reader, writer = DocumentReader(documents, region), DocumentWriter(documents, region)
        self.asking = ProfileAsking(self.areas.area(0), self.areas, reader, self.woken.append, lambda: self.time)
        self.profilers = [
            Profiler(ProfileAnswering(self.areas, self.areas.area(index + 1), writer, index, lambda: self.time), self.later)
            for index in range(2)
        ]

    def later(self, seconds: float, act: Callable[..., None], *arguments: object) -> Any:
        self.due.append((self.time + seconds, lambda: act(*arguments)))

    def ask(self, query: str = "", *, form: Any = COLLAPSED) -> PageAnswer:
        """Asks the page, and wakes the worker as its eventfd would."""
        page = ProfilePage(self.asking, form)
        answer = page(Request("GET", "/debug/profile", query=query))
        while self.woken:
            self.profilers[self.woken.pop()].woken()
        return answer

    def advance(self, seconds: float) -> None:
        self.time += seconds
        due, self.due = [d for d in self.due if d[0] <= self.time], [d for d in self.due if d[0] > self.time]
        for _, act in due:
            act()


@pytest.fixture
def site() -> Iterator[Site]:
    before = signal.getsignal(signal.SIGPROF)
    site = Site()
    yield site
    for profiler in site.profilers:
        profiler.close()
    signal.signal(signal.SIGPROF, before)


def pieces(answer: PageAnswer) -> Iterator[Any]:
    assert not isinstance(answer.body, bytes)
    return answer.body


def text(answer: PageAnswer) -> str:
    assert isinstance(answer.body, bytes)
    return answer.body.decode()


def outer(times: int) -> None:
    for _ in range(times):
        inner()


def inner() -> None:
    signal.raise_signal(signal.SIGPROF)


def test_the_page_has_the_stacks_that_the_worker_was_in(site: Site) -> None:
    body = pieces(site.ask("worker=1&seconds=5"))
    assert isinstance(next(body), Pause)
    outer(3)
    inner()
    site.advance(4.9)
    assert isinstance(next(body), Pause), "it samples for 5 s"
    site.advance(0.1)
    stacks = dict(line.rsplit(" ", 1) for line in next(body).decode().splitlines())
    by_leaf = {tuple(stack.rsplit(";", 2)[1:]): int(count) for stack, count in stacks.items()}
    module = __name__
    assert by_leaf[(f"{module}.outer", f"{module}.inner")] == 3
    test = f"{module}.test_the_page_has_the_stacks_that_the_worker_was_in"
    assert by_leaf[(test, f"{module}.inner")] == 1
    assert next(body, None) is None


def test_no_timer_runs_and_no_handler_is_installed_without_a_question(site: Site) -> None:
    before = signal.getsignal(signal.SIGPROF)
    site.profilers[0].woken()
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0) and signal.getsignal(signal.SIGPROF) is before
    site.ask("worker=0&seconds=1")
    assert signal.getitimer(signal.ITIMER_PROF)[1] > 0
    site.advance(1)
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGPROF) is signal.SIG_IGN, "the default would end a worker whose last signal is late"
    site.ask("worker=0&seconds=1")
    site.profilers[0].close()
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    site.advance(1)


def test_one_profile_is_made_at_a_time(site: Site) -> None:
    body = pieces(site.ask("worker=0&seconds=10"))
    again = site.ask("worker=1&seconds=1")
    assert again.status == HTTPStatus.SERVICE_UNAVAILABLE and "under way" in text(again)
    assert dict(again.fields)["Retry-After"] == str(10 + int(GRACE_S))
    site.advance(10)
    assert isinstance(next(body), bytes)
    assert isinstance(next(pieces(site.ask("worker=1&seconds=1"))), Pause)


def test_a_client_that_leaves_blocks_the_next_one_only_until_the_profile_is_over(site: Site) -> None:
    pieces(site.ask("worker=0&seconds=3")).close()  # type: ignore[attr-defined]
    site.advance(3)
    assert site.ask("worker=0").status == HTTPStatus.SERVICE_UNAVAILABLE
    site.advance(GRACE_S)
    assert site.ask("worker=0").status == HTTPStatus.OK


def test_a_worker_that_has_ended_is_reported_and_its_successor_answers_no_old_question(site: Site) -> None:
    page = ProfilePage(site.asking, COLLAPSED)
    body = pieces(page(Request("GET", "/debug/profile", query="worker=0&seconds=1")))
    site.advance(LATE_S + 0.1)
    site.profilers[0].woken()  # of the successor
    assert site.due == []
    site.advance(1 + GRACE_S)
    with pytest.raises(TimeoutError, match="worker 0 has not answered"):
        next(body)
    assert site.ask("worker=0").status == HTTPStatus.OK


def test_without_a_number_the_first_worker_that_serves_is_asked_for_30_seconds(site: Site) -> None:
    site.areas.set_serving(1, False)
    site.ask()
    assert site.due[0][0] == 1030.0
    site.profilers[0].woken()
    assert len(site.due) == 1, "the question is for worker 1"


@pytest.mark.parametrize("query", ["seconds=0", f"seconds={SECONDS_MAX + 1}", "seconds=x", "worker=-1", "worker=99999"])
def test_a_wrong_parameter_is_named_with_its_rule(site: Site, query: str) -> None:
    answer = site.ask(query)
    assert answer.status == HTTPStatus.BAD_REQUEST
    assert f"{query.partition('=')[0]} must be" in text(answer)


def test_a_worker_that_does_not_serve_is_refused_with_those_that_do(site: Site) -> None:
    answer = site.ask("worker=7")
    assert answer.status == HTTPStatus.NOT_FOUND
    assert text(answer) == "worker 7 does not serve; these do: 0, 1\n"
    for ordinal in (1, 2):
        site.areas.set_serving(ordinal, False)
    assert text(site.ask()) == "worker 0 does not serve; these do: none\n"


def test_a_head_request_asks_no_worker(site: Site) -> None:
    page = ProfilePage(site.asking, PPROF)
    assert page(Request("HEAD", "/debug/pprof/profile")) == PageAnswer(b"", BINARY)
    assert site.woken == []


@given(st.integers(0, (1 << 42) - 1), st.integers(0, (1 << 12) - 1), st.integers(1, SECONDS_MAX))
def test_a_question_is_one_word(asked_ms: int, worker: int, seconds: int) -> None:
    question = Question(asked_ms, worker, seconds)
    assert Question.of(question.word) == question and question.word < 1 << 63


def callee(_: int) -> None:
    """Called by C code that has taken its time before."""


def test_time_in_c_does_not_count_for_the_function_that_c_calls_next() -> None:
    sampler = Sampler()
    before = signal.signal(signal.SIGPROF, sampler.sample)
    raises = getattr(ctypes.CDLL(None), "raise")  # signal.raise_signal would run the handler itself
    try:
        list(map(callee, map(raises, [signal.SIGPROF] * 3)))
    finally:
        signal.signal(signal.SIGPROF, before)
    profile = sampler.profile(0, 1)
    leaves = [profile.functions[stack[-1]].name.rpartition(".")[2] for stack, _ in profile.stacks]
    assert leaves == ["test_time_in_c_does_not_count_for_the_function_that_c_calls_next"]
    assert profile.stacks[0][1] == 3


def test_a_stack_is_cut_off_at_its_outer_end_and_the_number_of_stacks_is_bounded() -> None:
    sampler = Sampler()

    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            sampler.sample(signal.SIGPROF, sys._getframe())

    deep(2 * DEPTH_MAX)
    (stack,) = sampler.profile(0, 1).stacks
    assert len(stack[0]) == DEPTH_MAX
    for number in range(STACKS_MAX + 5):
        scope = {"sampler": sampler, "sys": sys}
        exec(f"def f{number}(): sampler.sample(0, sys._getframe())\nf{number}()", scope)
    assert len(sampler.counts) == STACKS_MAX and sampler.left_out == 6


@examples(20)
@given(st.integers(0, 900), st.integers(0, 1 << 32))
def test_a_profile_of_any_size_fits_and_counts_every_sample(stacks: int, seed: int) -> None:
    rng = random.Random(seed)
    functions = [Function(f"m.{rng.getrandbits(160):x}", f"/{rng.getrandbits(64):x}.py", n) for n in range(stacks + 1)]
    listed = [([rng.randrange(len(functions)) for _ in range(30)], rng.randrange(1, 50)) for _ in range(stacks)]
    data = packed(Profile(1, 5, functions, listed, 3))
    assert len(data) <= DOCUMENT_BYTES
    back = unpacked(data)
    assert sum(count for _, count in back.stacks) + back.left_out == sum(count for _, count in listed) + 3
    named = {(tuple(functions[n] for n in stack), count) for stack, count in listed}
    assert all((tuple(back.functions[n] for n in stack), count) in named for stack, count in back.stacks)


PROFILE = Profile(0, 2, [Function("a.f", "a.py", 1), Function("b.g", "b.py", 300)], [([0, 1], 7), ([0], 2)], 4)


def test_the_lines_are_what_flame_graph_tools_read() -> None:
    assert collapsed(PROFILE).decode().splitlines() == [f"{LEFT_OUT} 4", "a.f 2", "a.f;b.g 7"]
    assert collapsed(Profile(0, 1, [], [])) == b""


def message(name: str, /, **fields: tuple[int, str, bool]) -> descriptor_pb2.DescriptorProto:
    kinds = {"int": 3, "text": 9}
    made = descriptor_pb2.DescriptorProto(name=name)
    for field, (number, kind, many) in fields.items():
        added = made.field.add(name=field, number=number, label=3 if many else 1, type=kinds.get(kind, 11))
        if kind not in kinds:
            added.type_name = f".t.{kind}"
    return made


def test_pprof_reads_the_other_form() -> None:
    """The messages are those of proto/profile.proto in github.com/google/pprof, as far as they are used."""
    file = descriptor_pb2.FileDescriptorProto(name="t.proto", package="t", syntax="proto3")
    file.message_type.extend(
        [
            message("ValueType", type=(1, "int", False), unit=(2, "int", False)),
            message("Sample", location_id=(1, "int", True), value=(2, "int", True)),
            message("Line", function_id=(1, "int", False), line=(2, "int", False)),
            message("Location", id=(1, "int", False), line=(4, "Line", True)),
            message(
                "Function",
                id=(1, "int", False),
                name=(2, "int", False),
                system_name=(3, "int", False),
                filename=(4, "int", False),
                start_line=(5, "int", False),
            ),
            message(
                "Profile",
                sample_type=(1, "ValueType", True),
                sample=(2, "Sample", True),
                location=(4, "Location", True),
                function=(5, "Function", True),
                string_table=(6, "text", True),
                duration_nanos=(10, "int", False),
                period_type=(11, "ValueType", False),
                period=(12, "int", False),
            ),
        ]
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call]
    read: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Profile")).FromString(pprof(PROFILE))
    texts = list(read.string_table)
    assert texts[0] == ""
    assert [(texts[t.type], texts[t.unit]) for t in read.sample_type] == [("samples", "count"), ("cpu", "nanoseconds")]
    functions = {f.id: (texts[f.name], texts[f.filename], f.start_line) for f in read.function}
    at = {location.id: functions[location.line[0].function_id] for location in read.location}
    samples = [([at[n][0] for n in sample.location_id], list(sample.value)) for sample in read.sample]
    assert samples == [(["b.g", "a.f"], [7, 7 * NANOSECONDS]), (["a.f"], [2, 2 * NANOSECONDS]), ([LEFT_OUT], [4, 4 * NANOSECONDS])]
    assert functions[2] == ("b.g", "b.py", 300)
    assert (read.duration_nanos, read.period) == (2_000_000_000, NANOSECONDS)
    assert texts[read.period_type.type] == "cpu"
