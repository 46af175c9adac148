"""Any bytes in any division into reads: the engine never raises, and a fault is a GOAWAY."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.examples import examples
from tests.workers.transport.helpers import (
    CONTINUATION,
    DATA,
    HEADERS,
    PING,
    RST,
    SETTINGS,
    WINDOW,
    Echo,
    Engine,
    Recorder,
    block,
    frame,
    framed,
    setting,
    word,
)
from workers.transport.frames import PREFACE

SCRIPT = (
    PREFACE
    + frame(SETTINGS, 0, 0, setting(4, 100_000))
    + frame(SETTINGS, 1, 0)
    + frame(WINDOW, 0, 0, word(1 << 20))
    + frame(HEADERS, 4, 1, block())
    + frame(DATA, 0, 1, framed(b"first"))
    + frame(HEADERS, 0, 3, block()[:10])
    + frame(CONTINUATION, 4, 3, block()[10:])
    + frame(DATA, 8, 3, b"\x03" + framed(b"padded") + bytes(3))
    + frame(DATA, 0, 1, framed(b"x" * 20_000)[:15_000])
    + frame(PING, 0, 0, b"abcdefgh")
    + frame(DATA, 0, 3, framed(b"") + framed(b"two in one")[:7])
    + frame(DATA, 0, 1, framed(b"x" * 20_000)[15_000:])
    + frame(DATA, 1, 3, framed(b"two in one")[7:])
    + frame(HEADERS, 5, 1, block([("trailer", "1")]))
    + frame(HEADERS, 4, 5, block())
    + frame(RST, 0, 5, word(8))
)


def run(chunks):
    engine = Engine(Echo, hello=False)
    out = engine.connection.output()
    for chunk in chunks:
        engine.connection.receive(chunk)
        out += engine.connection.output()
    return [h.events for h in engine.handlers], out


WHOLE = run([SCRIPT])


@given(st.lists(st.integers(1, len(SCRIPT) - 1), max_size=40))
@examples(150)
def test_any_division_of_the_same_bytes_into_reads_gives_the_same_events_and_answers(cuts):
    edges = [0, *sorted(set(cuts)), len(SCRIPT)]
    assert run([SCRIPT[a:b] for a, b in itertools.pairwise(edges)]) == WHOLE


def test_reads_of_single_bytes_give_the_same_events_and_answers():
    assert run([SCRIPT[i : i + 1] for i in range(len(SCRIPT))]) == WHOLE
    first, second, third = WHOLE[0]
    assert [len(m) for _, m in first] == [5, 20_000, 0]
    assert second == [("message", b"padded"), ("message", b""), ("message", b"two in one"), ("half_closed", b"")]
    assert third == [("closed", b"")]


def check_endings(engine: Engine) -> None:
    engine.connection.lost()
    for handler in engine.handlers:
        ends = handler.count("closed")
        assert ends <= 1
        assert handler.count("half_closed") <= 1
    assert engine.connection.held == 0
    assert engine.errors == []


@given(st.lists(st.binary(max_size=60), max_size=10))
@examples(300)
def test_garbage_never_raises(chunks):
    engine = Engine()
    engine.open()
    for chunk in chunks:
        engine.receive(chunk)
    check_endings(engine)


numbers = st.sampled_from([0, 1, 2, 3, 5, 7, 9, 2**31 - 1])


some_frame = st.builds(
    frame,
    st.integers(0, 11),
    st.sampled_from([0, 1, 4, 5, 8, 9, 12, 13, 32, 36, 37, 255]),
    numbers,
    st.one_of(
        st.binary(max_size=40),
        st.just(block()),
        st.integers(0, 2**31).map(word),
        st.binary(max_size=20).map(framed),
        st.builds(setting, st.integers(0, 7), st.integers(0, 2**31)),
        st.just(framed(b"compressed", 1)),
    ),
)


@given(st.lists(some_frame, max_size=30), st.booleans())
@examples(500)
def test_any_frames_in_any_order_never_raise_and_a_fault_is_a_goaway(frames, echo):
    engine = Engine(Echo if echo else Recorder)
    out = []
    for data in frames:
        out += engine.receive(data)
    if engine.connection.closing and not any(type(f).__name__ == "GoAwayFrame" for f in out):
        raise AssertionError("closed without a GOAWAY")
    assert engine.errors == []
    check_endings(engine)


def test_a_single_random_byte_error_in_a_script_is_survived():
    for position in range(24, len(SCRIPT)):
        if position % 7:
            continue
        engine = Engine(Echo, hello=False)
        broken = bytearray(SCRIPT)
        broken[position] ^= 0x55
        engine.receive(bytes(broken))
        check_endings(engine)
