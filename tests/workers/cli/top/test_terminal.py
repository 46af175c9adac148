"""The wait between two looks: keys of a pseudo-terminal, and signals."""

import os
import pty
import signal
import termios
from collections.abc import Iterator

import pytest

from workers.cli.top.terminal import SIGNALS, Terminal

LONG_S = 30.0


class Keyboard:
    """A pseudo-terminal. One of its ends is the input of this process."""

    def __init__(self) -> None:
        self._typed, self.input = pty.openpty()

    def type(self, keys: bytes) -> None:
        os.write(self._typed, keys)

    def hang_up(self) -> None:
        os.close(self._typed)
        self._typed = -1

    def reads_lines(self) -> bool:
        return bool(termios.tcgetattr(self.input)[3] & termios.ICANON)


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keyboard]:
    keyboard = Keyboard()
    with os.fdopen(keyboard.input) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        yield keyboard
    if keyboard._typed >= 0:
        os.close(keyboard._typed)


@pytest.mark.parametrize("key", [b"q", b"Q", b"xxq"])
def test_q_ends_the_wait_without_enter(keyboard: Keyboard, key: bytes) -> None:
    with Terminal(keys=True) as terminal:
        assert not keyboard.reads_lines()
        keyboard.type(key)
        assert terminal.wait(LONG_S)
        assert terminal.wait(LONG_S)  # every further wait also ends at once
    assert keyboard.reads_lines()


def test_other_keys_do_not_end_the_wait(keyboard: Keyboard) -> None:
    with Terminal(keys=True) as terminal:
        keyboard.type(b"abc")
        assert not terminal.wait(0.01)


def test_a_terminal_that_hangs_up_ends_the_wait(keyboard: Keyboard) -> None:
    with Terminal(keys=True) as terminal:
        keyboard.hang_up()
        assert terminal.wait(LONG_S)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_wait_and_the_old_handlers_are_restored(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with Terminal(keys=False) as terminal:
        os.kill(os.getpid(), number)
        assert terminal.wait(LONG_S)
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_an_input_that_was_closed_before_the_start_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with Terminal(keys=True) as terminal:
        assert not terminal.wait(0.0)


def test_an_input_that_is_not_a_terminal_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with Terminal(keys=True) as terminal:
            assert not terminal.wait(0.01)
