"""Messages and replicas for tests."""

import numpy as np

from workers.endpoints.replicas.wire import FORM, Message, encode, packed

Loads = dict[int, tuple[int, int]]


def rows_of(loads: Loads) -> bytes:
    keys = np.array(list(loads), np.uint64)
    requests, tokens = (np.array([load[at] for load in loads.values()], np.int64) for at in (0, 1))
    return packed(keys, requests, tokens)


def message(
    name: str = "b",
    sequence: int = 1,
    loads: Loads | None = None,
    *,
    whole: bool = False,
    epoch: int = 1,
    origin: int = 7,
    secret: int = 1,
    wants: bool = False,
) -> bytes:
    return encode(Message(FORM, name, epoch, origin, sequence, whole, secret, rows_of(loads or {}), wants=wants))
