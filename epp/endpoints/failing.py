"""Adds load for failed answers, so that an endpoint that fails fast does not look idle. Pure code.

Each failed answer is treated as if it had stayed in flight for the usual time of service. By Little's law (J. D. C. Little, 1961), an
endpoint that fails the share p of its requests, and has n in flight, would have n / (1 - p). The formula includes the next request, in case
n is 0:

    requests = n + (n + 1) * p / (1 - p)         at most as many as the busiest endpoint has
    tokens   = tokens in flight; each added request has the mean tokens of all requests in flight

So a failing endpoint never looks busier than all others, and failures of all endpoints alike change nothing.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SHARE_MAX = 0.99


def with_failed(requests: NDArray[Any], tokens: Floats | None, shares: Floats) -> tuple[NDArray[Any], Floats | None]:
    """Returns requests and tokens in flight, including those of failed answers. Arrays have a value per endpoint; `tokens` may be None.

    `shares`: the part of its requests that each endpoint fails, 0 to 1; if it is 0, the endpoint's load stays as it is.
    """
    part = np.minimum(shares, SHARE_MAX)
    most = requests.max(initial=0)
    further = np.minimum(np.ceil((requests + 1.0) * part / (1.0 - part)), most - requests)
    counted = requests + further.astype(requests.dtype)
    if tokens is None:
        return counted, None
    mean = float(tokens.sum()) / max(1.0, float(requests.sum()))
    return counted, np.maximum(tokens, np.minimum(tokens + further * mean, tokens.max(initial=0.0)))
