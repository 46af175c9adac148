"""Runs the cases of a test within one test, where the cases are many and short.

    @cases(("text", "sum"), [("1 + 1", 2), ("2 + 3", 5)])
    def test_a_text_is_computed(text: str, sum: int) -> None: ...

This is as `pytest.mark.parametrize`, which makes a test of each case. With four processes, pytest spends 1 to 2 ms of CPU on each test, and
many cases take less. All cases run, and the test shows the failure of each with its values. They share the test's fixtures, so a test
whose cases change a fixture, or skip, needs `parametrize`.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final

import pytest

SHOWN_MAX: Final = 300  # characters of a case's values
FAILURES: Final = (Exception, pytest.fail.Exception)

Test = Callable[..., None]


def cases(names: str | Iterable[str], values: Iterable[Any]) -> Callable[[Test], Test]:
    """Returns a decorator that calls a test with each of the values. `names`: of the parameters; values are tuples if these are several."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    arguments = [dict(zip(names, value if len(names) > 1 else (value,), strict=True)) for value in values]
    assert arguments, "a test without cases checks nothing"

    def decorated(test: Test) -> Test:
        signature = inspect.signature(test)
        rest = [parameter for name, parameter in signature.parameters.items() if name not in names]
        assert len(rest) == len(signature.parameters) - len(names), f"the test does not take all of {names}"

        @functools.wraps(test)
        def each(**fixtures: Any) -> None:
            failures = []
            for case in arguments:
                try:
                    test(**fixtures, **case)
                except FAILURES as failure:
                    failure.add_note("the case: " + ", ".join(f"{name}={value!r}" for name, value in case.items())[:SHOWN_MAX])
                    failures.append(failure)
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(arguments)} cases failed", failures)

        each.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return each

    return decorated
