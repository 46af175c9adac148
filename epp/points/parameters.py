"""Parameters of plugins: which values `epp record tune` may change and between which limits, and `inFlightLoadProducerName`.

A plugin gives the range of a parameter where it declares it: `Annotated[int, tuned(1, 256)]`. The weight of a scorer may change by the
factor WEIGHT_FACTOR. `epp config plugins` shows ranges and factors. A range has values that make sense to try; the limits of a parameter
(`ge`, `le`) say what is allowed. The parameter `inFlightLoadProducerName` has no effect on the counts, which all plugins share.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from epp.plugin import DataProducer, Need

RANGE: Final = "x-tuned-range"  # keyword in the JSON Schema of a parameter: [low, high]
WEIGHT_FACTOR: Final = 64.0


def tuned(low: float, high: float) -> msgspec.Meta:
    """Returns an annotation that gives the range of a parameter. Other annotations may stand beside it."""
    return msgspec.Meta(extra_json_schema={RANGE: [low, high]})


INFLIGHT_LOAD: Final = "inflight-load-producer"  # this producer counts the values of the column INFLIGHT_TOKENS


def named_load(name: str) -> Mapping[str, Need]:
    """Returns the `needs` of a plugin with the parameter `inFlightLoadProducerName: name`. The named producer must exist."""
    return {} if name in ("", INFLIGHT_LOAD) else {"load": Need("inFlightLoadProducerName", name, DataProducer)}
