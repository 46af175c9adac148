"""The parts of the state that show options: each has the name of its flag, and none shows a password."""

from typing import Any

import pytest

from workers.cli import serve_flags
from workers.host.options import OTHER_FLAGS, SECRET_OPTIONS, Options
from workers.supervisor.pages.state.parts import shown_option


def test_every_option_has_the_name_of_a_flag() -> None:
    names: set[str] = set()

    def command() -> None: ...

    for decorate in serve_flags.FLAGS:
        decorate(command)
    names = {option.name for option in command.__click_params__}  # type: ignore[attr-defined]
    shown = {OTHER_FLAGS.get(option, option) for option in Options.__struct_fields__}
    assert shown - names == {"given", "pool_given"}


def test_a_value_that_may_have_a_password_is_not_shown() -> None:
    assert {"replica_store"} == SECRET_OPTIONS
    assert shown_option("replica_store", "redis://:secret@host") == "(set)"
    assert shown_option("replica_store", "") == ""


@pytest.mark.parametrize(("value", "text"), [(True, "true"), (None, ""), (("a", "b"), "a,b"), (30.0, "30.0"), ("x" * 900, "x" * 200)])
def test_values_are_written_as_flags_take_them(value: Any, text: str) -> None:
    assert shown_option("any", value) == text
