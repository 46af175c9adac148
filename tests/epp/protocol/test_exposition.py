"""The finder compared with the client library's parser, and on malformed pages of servers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from epp.protocol.exposition import FAMILY_BYTES_MAX, SERIES_MAX, Finder, Malformed, Selector, labels_of, parse_selector

FAMILIES = ("a", "ab", "vllm:x", "vllm:x_total", "lora_info")
TEXT = st.text(st.sampled_from('ab"\\\n{},= #\u00e9'), max_size=6)
LABELS = st.dictionaries(st.sampled_from(("l", "le", "engine", "name")), TEXT, max_size=3)
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
    for name in draw(st.permutations(FAMILIES))[: draw(st.integers(0, 5))]:
        typed = draw(st.booleans())
        if typed:
            lines += [f'# HELP {name} a{{l="x"}} 7 of {name}', f"# TYPE {name} gauge"]
        stamped = draw(st.booleans())
        for labels in draw(st.lists(LABELS, min_size=1, max_size=3)):
            stamp = draw(st.integers(1, 9)) if stamped else None
            lines.append(line(name, labels, draw(VALUES), stamp))
    return "\n".join(lines) + "\n"


def expected(page: str, selector: Selector) -> tuple[dict[str, str], float] | None:
    best, best_stamp = None, -1.0
    wanted = {name.decode(): value.decode() for name, value in selector.labels}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name != selector.name or not wanted.items() <= sample.labels.items():
                continue
            stamp = float(sample.timestamp or 0)
            if stamp > best_stamp:
                best, best_stamp = (dict(sample.labels), sample.value), stamp
    return best


def decoded(found: tuple[bytes, float] | None) -> tuple[dict[str, str], float] | None:
    if found is None:
        return None
    labels = {name.decode(): value.decode() for name, value in labels_of(found[0]).items()}
    return labels, found[1]


SELECTORS = st.builds(
    lambda name, labels: Selector(name, tuple((key.encode(), value.encode()) for key, value in labels.items())),
    st.sampled_from(FAMILIES),
    st.dictionaries(st.sampled_from(("l", "le")), TEXT, max_size=1),
)


@given(st.lists(pages(), min_size=1, max_size=4), SELECTORS)
def test_a_finder_agrees_with_the_client_librarys_parser_on_every_page_of_a_sequence(
    sequence: list[str], selector: Selector
) -> None:
    finder = Finder(selector)
    for page in sequence:
        found, wanted = decoded(finder.find(page.encode())), expected(page, selector)
        assert str(found) == str(wanted)  # as text, so that NaN equals NaN


@given(st.binary(max_size=200), st.sampled_from(FAMILIES))
def test_any_bytes_give_a_series_or_none_or_malformed(noise: bytes, name: str) -> None:
    finder = Finder(Selector(name))
    for page in (noise, f'# TYPE {name} gauge\n{name}{{a="b"}} 1\n'.encode() + noise, noise):
        try:
            found = finder.find(page)
            assert found is None or isinstance(found[1], float)
        except Malformed:
            pass


PAGE = b'# TYPE up gauge\nup{a="x"} 1\n# TYPE queue gauge\nqueue{engine="0"} 3\n# TYPE z gauge\nz 1\n'


def test_a_family_that_moved_on_the_next_page_is_found_again() -> None:
    finder = Finder(Selector("queue"))
    assert finder.find(PAGE) == (b'engine="0"', 3.0)
    for shift in (b"", b"y 1\n", b"y 1\n" * 10, b"y 1\n" * 5000):
        moved = shift + PAGE.replace(b"} 3", b"} 4")
        assert finder.find(moved) == (b'engine="0"', 4.0)
    assert finder.find(b"z 1\n") is None
    assert finder.find(PAGE) == (b'engine="0"', 3.0)


def test_a_new_series_before_the_remembered_one_is_noticed() -> None:
    untyped = PAGE.replace(b"# TYPE queue gauge\n", b"")
    for page in (PAGE, untyped):
        finder = Finder(Selector("queue"))
        finder.find(page)
        assert finder.find(page.replace(b"queue{", b'queue{engine="9"} 7\nqueue{')) == (
            b'engine="9"',
            7.0,
        )


def test_a_new_series_with_a_later_timestamp_after_the_remembered_one_is_noticed() -> None:
    finder = Finder(Selector("queue"))
    finder.find(PAGE)
    later = PAGE.replace(b"} 3\n", b'} 3 5\nqueue{engine="1"} 8 6\n')
    assert finder.find(later) == (b'engine="1"', 8.0)


@pytest.mark.parametrize("between", [b"# a word\n", b"\n", b"\r\n", b"#\n"])
def test_a_new_series_after_a_line_without_a_sample_is_noticed(between: bytes) -> None:
    finder = Finder(Selector("info"), by_value=True)
    one, other = b'# TYPE info gauge\ninfo{n="a"} 1\n', b'info{n="b"} 2\n'
    assert finder.find(one) == (b'n="a"', 1.0)
    assert finder.find(one + between + other) == (b'n="b"', 2.0)


def test_the_largest_value_counts_for_info_metrics_with_a_time_as_value() -> None:
    finder = Finder(Selector("lora"), by_value=True)
    assert finder.find(b'lora{a="1"} 1.7e9\nlora{a="2"} 1.8e9\nlora{a="3"} 1.6e9\n') == (
        b'a="2"',
        1.8e9,
    )


@pytest.mark.parametrize(
    "page",
    [
        b"queue 3\r\nz 1\r\n",
        b"queue\t3\n",
        b'queue {engine="0"} 3\n',
        b"queue   3   \n",
        b'queue{engine="0",} 3 # {trace="ab cd"} 9.0 1.0\n# EOF\n',
        b'queue{a="}"} 3\n',
        b"queue_total 9\nqueue 3\n",
        b"# queue 9\n\n# HELP queue queue 8\nqueue 3\n",
        b"queue 3\n\n# a comment\nqueue 4\n",
        b"queue 3\n# a comment\n# TYPE other gauge\nother 4\n",
        b"queue 3\n# a comment\nother 4\n",
        b"queue 3\nqueue_total 4\n",
        b"queue 3",
    ],
)
def test_forms_that_servers_use_are_read(page: bytes) -> None:
    found = Finder(Selector("queue")).find(page)
    assert found is not None
    assert found[1] == 3.0


@pytest.mark.parametrize(
    "page",
    [
        b"queue x\n",
        b"queue \n",
        b"queue 1_0\n",
        b"queue 0x1p3\n",
        b"queue 1 yesterday\n",
        b'queue{a="b" 3\n',
        b'queue{a="b\n',
        b"queue{\n",
    ],
)
def test_a_line_that_cannot_be_read_is_malformed(page: bytes) -> None:
    with pytest.raises(Malformed):
        Finder(Selector("queue")).find(page)


@pytest.mark.parametrize("text", [b"a=b", b'a="b', b'="b"', b'a="b"c="d"', b'1="b"'])
def test_labels_that_cannot_be_read_are_malformed(text: bytes) -> None:
    with pytest.raises(Malformed, match="labels cannot be read"):
        labels_of(text)


def test_a_family_with_too_many_series_is_malformed() -> None:
    finder = Finder(Selector("q"))
    assert finder.find(b"q 1\n" * SERIES_MAX) == (b"", 1.0)
    with pytest.raises(Malformed, match=f"more than {SERIES_MAX} series"):
        finder.find(b"q 1\n" * (SERIES_MAX + 1))


@pytest.mark.parametrize(
    "line",
    [b"q 1\n", b"# a word\n", b"\n", b"\r\n", b'q{a="' + b"x" * 500 + b'"} 1\n', b'q{a="' + b"x" * 2000 + b'"} 1\n'],
)
def test_a_family_with_too_many_bytes_is_malformed(line: bytes) -> None:
    few = min((FAMILY_BYTES_MAX - 100) // len(line), SERIES_MAX - 1)
    many = 2 * FAMILY_BYTES_MAX // len(line)
    assert Finder(Selector("q")).find(b"q 1\n" + line * few + b"z 1\n") is not None
    with pytest.raises(Malformed, match=rf"more than ({FAMILY_BYTES_MAX} bytes|{SERIES_MAX} series)|cannot be read"):
        Finder(Selector("q")).find(b"q 1\n" + line * many + b"z 1\n")
    assert Finder(Selector("z")).find(line * many + b"z 1\n") == (b"", 1.0)


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
    assert parse_selector(text) == selector
    assert parse_selector(str(selector)) == selector


@pytest.mark.parametrize("text", ["", "1a", "a b", "a{l", "a{l}", "a{l!=v}", "a{l=~v}", "a{=v}", "a-b"])
def test_an_invalid_selector_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="'"):
        parse_selector(text)


@pytest.mark.parametrize("value", [b"x", b"1_0", b""])
def test_a_remembered_series_is_malformed_if_its_value_is_no_longer_a_number(value: bytes) -> None:
    finder = Finder(Selector("queue"))
    finder.find(PAGE)
    with pytest.raises(Malformed):
        finder.find(PAGE.replace(b"} 3\n", b"} " + value + b"\n"))
