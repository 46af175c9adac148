"""Counts failed answers as load: so an endpoint that fails fast does not look idle. Pure code.

Each failed answer would have kept its place for the usual time of service. By Little's law (J. D. C. Little, 1961), an endpoint that fails
the share p of its requests, and has n in flight, would then have n / (1 - p). So that 0 requests count, too, the next one is included:

    requests = n + (n + 1) * p / (1 - p)         at most as many as the busiest endpoint has
    tokens   = the same, each further request with the mean tokens of all requests in flight

So a failing endpoint never looks busier than all others, and failures of all endpoints alike change nothing.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SHARE_MAX = 0.99


def with_failed(requests: NDArray[Any], tokens: Floats | None, shares: Floats) -> tuple[NDArray[Any], Floats | None]:
    """Returns requests and tokens in flight, with those of failed answers. Arrays have a value per endpoint; `tokens` may be None.

    `shares`: which part of its requests each endpoint fails, 0 to 1; 0: it counts as it is.
    """
    part = np.minimum(shares, SHARE_MAX)
    most = requests.max(initial=0)
    further = np.minimum(np.ceil((requests + 1.0) * part / (1.0 - part)), most - requests)
    counted = requests + further.astype(requests.dtype)
    if tokens is None:
        return counted, None
    mean = float(tokens.sum()) / max(1.0, float(requests.sum()))
    return counted, np.maximum(tokens, np.minimum(tokens + further * mean, tokens.max(initial=0.0)))
