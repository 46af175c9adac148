"""Tests of the checks and the fences of a machine's memory order."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from shm import fence
from shm.fence import choose, lock_fence, refuse_machine


def test_this_machine_is_accepted() -> None:
    assert refuse_machine("little", 8) is None


@pytest.mark.parametrize(("order", "size", "why"), [("big", 8, "big-endian"), ("little", 4, "32")])
def test_a_machine_with_another_layout_is_refused(order: str, size: int, why: str) -> None:
    assert why in refuse_machine(order, size)


def test_the_import_fails_on_a_refused_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    fence.check_machine()
    monkeypatch.setattr(fence, "refuse_machine", lambda byteorder, size: "no such machine")
    with pytest.raises(ImportError, match="no such machine"):
        fence.check_machine()


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "riscv64"])
def test_a_machine_that_may_change_the_order_gets_a_fence_that_works(machine: str) -> None:
    order = choose(machine)
    assert order is not choose("x86_64")
    order()
    order()


def test_threads_may_use_the_fence_without_kernels_at_once() -> None:
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: lock_fence(), range(1000))) == [None] * 1000
