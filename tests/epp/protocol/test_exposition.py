"""The finder compared with the client library's parser, and on malformed pages of servers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from epp.protocol.exposition import FAMILY_BYTES_MAX, LINES_MAX, SERIES_MAX, Finder, Malformed, Sample, Selector, labels_of, parse_selector
from tests.cases import cases

FAMILIES = ("a", "ab", "vllm:x", "vllm:x_total", "lora_info")
TEXT = st.text(st.sampled_from('ab"\\\n{},= #\u00e9'), max_size=6)
LABELS = st.dictionaries(st.sampled_from(("l", "le", "engine", "name")), TEXT, max_size=3)
INDENTS = st.sampled_from(("", "", " ", " \t"))
VALUES = st.floats() | st.integers(0, 10**6).map(float)


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def line(name: str, labels: dict[str, str], value: float, timestamp: int | None) -> str:
    inside = ",".join(f'{key}="{escaped(text)}"' for key, text in labels.items())
    shown = {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, repr(value))
    behind = "" if timestamp is None else f" {timestamp}"
    return f"{name}{{{inside}}} {shown}{behind}" if inside else f"{name} {shown}{behind}"


@st.composite
def pages(draw: st.DrawFn) -> str:
    lines = []
    for name in draw(st.lists(st.sampled_from(FAMILIES), max_size=5)):
        typed = draw(st.booleans())
        if typed:
            lines += [f'# HELP {name} a{{l="x"}} 7 of {name}', f"# TYPE {name} gauge"]
        stamped = draw(st.booleans())
        for labels in draw(st.lists(LABELS, min_size=1, max_size=3)):
            stamp = draw(st.integers(1, 9)) if stamped else None
            lines.append(draw(INDENTS) + line(name, labels, draw(VALUES), stamp))
    return "\n".join(lines) + "\n"


Series = tuple[dict[str, str], float, float]


def expected(page: str, selector: Selector) -> list[Series]:
    wanted = {name.decode(): value.decode() for name, value in selector.labels}
    return [
        (dict(sample.labels), sample.value, float(sample.timestamp or 0))
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == selector.name and wanted.items() <= sample.labels.items()
    ]


def decoded(sample: Sample) -> Series:
    labels = {name.decode(): value.decode() for name, value in labels_of(sample.text).items()}
    return labels, sample.value, sample.stamp / 1000.0


SELECTORS = st.builds(
    lambda name, labels: Selector(name, tuple((key.encode(), value.encode()) for key, value in labels.items())),
    st.sampled_from(FAMILIES),
    st.dictionaries(st.sampled_from(("l", "le")), TEXT, max_size=1),
)


@given(st.lists(pages(), min_size=1, max_size=4), SELECTORS)
def test_a_finder_agrees_with_the_client_librarys_parser_on_every_page_of_a_sequence(sequence: list[str], selector: Selector) -> None:
    finder = Finder(selector)
    for page in sequence:
        wanted = expected(page, selector)
        quick = finder.find(page.encode())
        found = [decoded(sample) for sample in finder.samples(page.encode())]
        assert str(found) == str(wanted)  # as text, so that NaN equals NaN
        assert quick != quick or [quick] == [value for _, value, _ in wanted]


@given(st.binary(max_size=200), st.sampled_from(FAMILIES))
def test_any_bytes_give_series_or_malformed(noise: bytes, name: str) -> None:
    finder = Finder(Selector(name))
    for page in (noise, f'# TYPE {name} gauge\n{name}{{a="b"}} 1\n'.encode() + noise, noise):
        try:
            assert isinstance(finder.find(page), float)
            assert all(isinstance(sample.value, float) for sample in finder.samples(page))
        except Malformed:
            pass


PAGE = b'# TYPE up gauge\nup{a="x"} 1\n# TYPE queue gauge\nqueue{engine="0"} 3\n# TYPE z gauge\nz 1\n'


def values(finder: Finder, page: bytes) -> list[float]:
    found = finder.find(page)
    return [found] if found == found else [sample.value for sample in finder.samples(page)]


def test_a_family_that_moved_on_the_next_page_is_found_again() -> None:
    finder = Finder(Selector("queue"))
    assert values(finder, PAGE) == [3.0]
    for shift in (b"", b"y 1\n", b"y 1\n" * 10, b"y 1\n" * 5000):
        assert values(finder, shift + PAGE.replace(b"} 3", b"} 4")) == [4.0]
    assert values(finder, b"z 1\n") == []
    assert values(finder, PAGE) == [3.0]
    assert finder.find(PAGE) == 3.0
    assert finder.text == b'engine="0"'


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_a_new_series_beside_the_remembered_one_is_noticed(typed: bool, before: bool) -> None:
    page = PAGE if typed else PAGE.replace(b"# TYPE queue gauge\n", b"")
    old, new = b'queue{engine="0"} 3\n', b'queue{engine="9"} 7\n'
    finder = Finder(Selector("queue"))
    values(finder, page)
    both = page.replace(old, new + old if before else old + new)
    assert sorted(values(finder, both)) == [3.0, 7.0]
    assert sorted(values(finder, both)) == [3.0, 7.0]
    assert values(finder, page) == [3.0]


@pytest.mark.parametrize("between", [b"# a word\n", b"\n", b"\r\n", b"#\n", b"other 9\n", b"# TYPE other gauge\nother 9\n"])
def test_series_of_one_family_in_several_places_are_all_found(between: bytes) -> None:
    finder = Finder(Selector("queue"))
    one, other = b'# TYPE queue gauge\nqueue{n="a"} 1\n', b'queue{n="b"} 2\nqueue{n="c"} 3\n'
    for page in (one + between + other, b"# first\n" + one + between + other, other + between + one):
        for _ in range(2):
            assert sorted(values(finder, page)) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("between", [b"\n", b"#\n", b"\r\n"])
def test_lines_without_a_sample_that_come_among_remembered_series_are_passed(between: bytes) -> None:
    finder = Finder(Selector("queue"))
    lines = [b'queue{n="%d"} %d\n' % (number, number) for number in range(4)]
    assert values(finder, b"first 1\n" + b"".join(lines)) == [0.0, 1.0, 2.0, 3.0]
    assert values(finder, b"first 1\n" + b"".join(lines[:2]) + between + b"".join(lines[2:])) == [0.0, 1.0, 2.0, 3.0]


def test_a_second_place_is_noticed_on_the_page_with_which_it_comes() -> None:
    finder = Finder(Selector("num_requests_waiting"))
    page = PAGE.replace(b"queue", b"num_requests_waiting")
    for other in (b'num_requests_waiting{n="1"} 9\n', b"num_requests_waiting{} 120\n"):
        assert values(finder, page) == [3.0]
        assert len(values(finder, page + other)) == 2
        assert len(values(finder, other + page)) == 2


def test_while_no_line_comes_or_goes_the_remembered_place_alone_is_read() -> None:
    """So another place costs no search on each page."""
    finder = Finder(Selector("queue"))
    page = PAGE.replace(b"# TYPE z", b'queue{engine="1"} 5\n# TYPE z')
    assert values(finder, page) == [3.0, 5.0]
    assert values(finder, page.replace(b"} 3", b"} 4") + b"queue 9\n") == [4.0, 5.0]


LORA = Selector("lora")


@pytest.mark.parametrize(
    ("page", "newest"),
    [
        (b'lora{a="1"} 1.7e9\nlora{a="2"} 1.8e9\nlora{a="3"} 1.6e9\n', [b'a="2"']),
        (b'lora{a="1"} 1.8e9\nlora{a="2"} 1.8e9\n', [b'a="1"', b'a="2"']),
        (b'lora{a="1"} 5\r\nx 9\nlora{a="2"}\t6 \n', [b'a="2"']),
        (b'lora{engine="0",a="1"} 4\nlora{a="2",engine="0"} 5\nlora{a="3",engine="1"} 1\n', [b'a="2",engine="0"', b'a="3",engine="1"']),
        (b'lora{a="1"} 7 1700000000000\nlora{a="2"} 8 1600000000000\n', [b'a="2"']),
        (b'lora{a="x } 9"} 7 1700000000000\nlora{a="}",} 6\n', [b'a="x } 9"']),
        (b"lora 7\n", [b""]),
        (b"lora 7 1700000000000\n", [b""]),
        (b"x 1\n", []),
    ],
)  # fmt: skip
def test_of_metrics_with_a_time_as_value_the_newest_of_each_data_parallel_rank_counts(page: bytes, newest: list[bytes]) -> None:
    assert Finder(LORA).newest(page) == (newest, "")


@pytest.mark.parametrize("wrong", [b"NaN", b"+Inf", b"x"])
def test_a_value_that_is_no_time_leaves_the_others(wrong: bytes) -> None:
    for page in (b'lora{a="1"} 5\nlora{a="2"} %b\n', b'lora{a="2"} %b\nlora{a="1"} 5\n'):
        texts, why = Finder(LORA).newest(page % wrong)
        assert texts == [b'a="1"']
        assert why.endswith("is not a time")


def test_thousands_of_outdated_series_are_read() -> None:
    """8,000 combinations of adapters are 1.7 MB; only the newest has its labels read."""
    old = b"".join(b'lora{running="%d%s"} 1.7e+09\n' % (number, b"x" * 190) for number in range(8000))
    page = b"# TYPE lora gauge\n" + old.replace(b'="4000x', b'="newest', 1).replace(b"1.7e+09", b"1.6e+09", 3000)
    at = page.index(b'="newest')
    page = page[:at] + page[at:].replace(b"1.7e+09", b"1.8e+09", 1)
    assert len(page) > FAMILY_BYTES_MAX
    (text,), why = Finder(LORA).newest(page)
    assert text.startswith(b'running="newest') and not why


@cases(
    "page",
    [
        b"queue 3\r\nz 1\r\n",
        b"queue\t3\n",
        b" queue 3\n",
        b"# TYPE queue gauge\n\t queue 3\nz 1\n",
        b'queue {engine="0"} 3\n',
        b"queue   3   \n",
        b'queue{engine="0",} 3 # {trace="ab cd"} 9.0 1.0\n# EOF\n',
        b'queue{a="}"} 3\n',
        b"queue_total 9\nqueue 3\n",
        b"# queue 9\n\n# HELP queue queue 8\nqueue 3\n",
        b"queue 3\n# a comment\n# TYPE other gauge\nother 4\n",
        b"queue 3\n# a comment\nother 4\n",
        b"queue 3\nqueue_total 4\n",
        b"queue 3",
    ],
)
def test_forms_that_servers_use_are_read(page: bytes) -> None:
    assert values(Finder(Selector("queue")), page) == [3.0]


@pytest.mark.parametrize(
    "page",
    [b"queue x\n", b"queue \n", b"queue 1_0\n", b"queue 0x1p3\n", b"queue 1 yesterday\n", b'queue{a="b" 3\n', b'queue{a="b\n', b"queue{\n"],
)
def test_a_line_that_cannot_be_read_is_malformed(page: bytes) -> None:
    with pytest.raises(Malformed):
        Finder(Selector("queue")).samples(page)


@pytest.mark.parametrize("text", [b"a=b", b'a="b', b'="b"', b'a="b"c="d"', b'1="b"'])
def test_labels_that_cannot_be_read_are_malformed(text: bytes) -> None:
    with pytest.raises(Malformed, match="labels cannot be read"):
        labels_of(text)


@pytest.mark.parametrize("text", [b"q 1\n", b"q 1\nz 1\n"])
def test_a_family_with_too_many_series_is_malformed(text: bytes) -> None:
    finder = Finder(Selector("q"))
    assert len(finder.samples(text * SERIES_MAX)) == SERIES_MAX
    for read, most in ((finder.samples, SERIES_MAX), (finder.newest, SERIES_MAX), (finder.lines, LINES_MAX)):
        with pytest.raises(Malformed, match=f"more than {most} series"):
            read(text * (most + 1))


@pytest.mark.parametrize("line", [b'q{a="' + b"x" * 500 + b'"} 1\n', b'q{a="' + b"x" * 2000 + b'"} 1\n'])
def test_a_family_with_too_many_bytes_is_malformed(line: bytes) -> None:
    few, many = (FAMILY_BYTES_MAX - 100) // len(line), FAMILY_BYTES_MAX // len(line) + 9
    assert len(Finder(Selector("q")).samples(line * few + b"z 1\n")) == few
    with pytest.raises(Malformed, match=f"more than {FAMILY_BYTES_MAX} bytes"):
        Finder(Selector("q")).samples(line * many + b"z 1\n")
    assert values(Finder(Selector("z")), line * many + b"z 1\n") == [1.0]


def test_reading_many_labels_takes_linear_time() -> None:
    assert labels_of(b'a="b",' * 300_000 + b" \t") == {b"a": b"b"}
    with pytest.raises(Malformed):
        labels_of(b'a="b",' * 300_000 + b"x")


@pytest.mark.parametrize(
    ("text", "selector"),
    [
        ("a:b", Selector("a:b")),
        (" a { } ", Selector("a")),
        ("a{l=v}", Selector("a", ((b"l", b"v"),))),
        ('a{l="v, w",m=x}', Selector("a", ((b"l", b"v, w"), (b"m", b"x")))),
    ],
)
def test_selectors_are_read_with_and_without_quotes(text: str, selector: Selector) -> None:
    assert parse_selector(text, "spec") == selector
    assert parse_selector(str(selector), "spec") == selector


@pytest.mark.parametrize("text", ["", "1a", "a b", "a{l", "a{l}", "a{l!=v}", "a{l=~v}", "a{=v}", "a-b"])
def test_an_invalid_selector_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="'"):
        parse_selector(text, "spec")


@pytest.mark.parametrize("value", [b"x", b"1_0", b""])
def test_a_remembered_series_is_malformed_if_its_value_is_no_longer_a_number(value: bytes) -> None:
    finder = Finder(Selector("queue"))
    values(finder, PAGE)
    with pytest.raises(Malformed):
        values(finder, PAGE.replace(b"} 3\n", b"} " + value + b"\n"))
