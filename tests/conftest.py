"""Configures all tests: one thread per library, generated examples that do not depend on the load of the machine, and plain tracebacks.

Also saves CPU that each test and each example would cost: most tests take a millisecond.
"""

import faulthandler
import gc
import os
import time
from collections.abc import Generator

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported: tests that fork need a single thread

import pytest
import structlog
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings
from hypothesis.internal import entropy

from tests.examples import USUAL, number

HANGS_S = 60.0  # a test that runs so long, or up to REARM_S less, prints the stacks of all threads
REARM_S = 5.0
armed_at = float("-inf")

settings.register_profile(
    "default",
    max_examples=number(USUAL),
    deadline=None,  # on a shared machine every limit per example is flaky; pytest-timeout ends a hang
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile(
    "ci",
    parent=settings.get_profile("default"),
    derandomize=True,  # the same commit gives the same result
    database=None,
)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# Hypothesis would save, seed and restore NumPy's global generator for each example: 70 µs. ruff (NPY002) lets nothing use it.
entropy.NP_RANDOM = entropy  # type: ignore[assignment]

# structlog would print all local variables of a traceback in colours: seconds for a frame with a large array.
structlog.configure(
    [*structlog.get_config()["processors"][:-1], structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector from walking eleven thousand collected tests again and again: that cost a third of a short run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Lets a test that hangs print its stacks. pytest would start and end a thread for each test (`faulthandler_timeout`): 0.3 ms."""
    global armed_at
    now = time.monotonic()
    if now - armed_at > REARM_S:
        faulthandler.dump_traceback_later(HANGS_S, file=item.config.stash[fault_handler_stderr_fd_key])
        armed_at = now


def pytest_exception_interact() -> None:
    """Sets the timer again for the next test: pytest stops it after each failure."""
    global armed_at
    armed_at = float("-inf")


def pytest_sessionfinish() -> None:
    """Stops the timer."""
    faulthandler.cancel_dump_traceback_later()
