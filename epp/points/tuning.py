"""Which values `epp record tune` may change, and between which limits.

A plugin gives the range of a parameter where it declares it: `Annotated[int, tuned(1, 256)]`. The weight of a scorer may change by the
factor WEIGHT_FACTOR. `epp config plugins` shows both. A range has values that make sense to try; the limits of a parameter (`ge`, `le`) say
what is allowed.
"""

from typing import Final

import msgspec

RANGE: Final = "x-tuned-range"  # keyword in the JSON Schema of a parameter: [low, high]
WEIGHT_FACTOR: Final = 64.0


def tuned(low: float, high: float) -> msgspec.Meta:
    """Returns an annotation that gives the range of a parameter. Other annotations may stand beside it."""
    return msgspec.Meta(extra_json_schema={RANGE: [low, high]})
