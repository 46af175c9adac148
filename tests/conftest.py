"""Configures all tests: one thread per library, generated examples that do not depend on the load of the machine, and plain tracebacks."""

import gc
import os
from collections.abc import Generator

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported: tests that fork need a single thread

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.examples import USUAL, number

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
