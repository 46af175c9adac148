"""How many generated examples a property gets: the number that it asks for, times EXAMPLES in the environment."""

import os
from typing import Any, Final

from hypothesis import settings

USUAL: Final = 60  # `make fuzz` runs thousands
MIN: Final = 5


def number(count: int) -> int:
    """Returns how many examples there are where the property asks for `count`."""
    return max(MIN, round(count * float(os.environ.get("EXAMPLES", "1"))))


def examples(count: int, **more: Any) -> settings:
    """Returns the settings of a property. `more`: other settings of hypothesis."""
    return settings(max_examples=number(count), **more)
