"""Tests of the checks and the description of a machine's memory order."""

import pytest

from shm import fence
from shm.fence import promise, refuse_machine


def test_this_machine_is_accepted_and_described() -> None:
    assert refuse_machine("little", 8) is None
    assert ":" in promise()


@pytest.mark.parametrize(("order", "size", "why"), [("big", 8, "big-endian"), ("little", 4, "32")])
def test_a_machine_with_another_layout_is_refused(order: str, size: int, why: str) -> None:
    assert why in refuse_machine(order, size)


def test_the_import_fails_on_a_refused_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    fence.check_machine()
    monkeypatch.setattr(fence, "refuse_machine", lambda byteorder, size: "no such machine")
    with pytest.raises(ImportError, match="no such machine"):
        fence.check_machine()


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        ("x86_64", "detect torn rows by their version"),
        ("aarch64", "does not keep the order"),
        ("riscv64", "unknown memory order"),
    ],
)
def test_the_promise_says_what_was_not_tested(machine: str, text: str) -> None:
    assert text in promise(machine)
    assert ("untested" in promise(machine)) == (machine != "x86_64")
