"""The parameters of `epp.plugins.usage_limits.static`. Not compiled: msgspec reads annotations at run time."""

from typing import Annotated

import msgspec


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One limit for all bands.

    threshold: The saturation at which all requests start to wait.
    """

    threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
