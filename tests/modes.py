"""Marks tests that run in one mode only: interpreted or compiled (`compiled.finder`)."""

import pytest

from compiled.finder import choose


def interpreted_only(why: str) -> pytest.MarkDecorator:
    """Marks a test that replaces or subclasses a part of the request path, which compiled code does not allow."""
    return pytest.mark.skipif(choose().compiled, reason=f"interpreted only: {why}")
