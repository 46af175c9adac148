"""Messages and replicas for tests."""

from array import array
from collections.abc import Sequence

from workers.replicas.wire import FORM, ROW, Blocks, Message, encode

Loads = dict[int, tuple[int, int]]


def rows_of(loads: Loads) -> bytes:
    return b"".join(ROW.pack(key, *load) for key, load in loads.items())


def loads_of(rows: bytes) -> list[tuple[int, tuple[int, int]]]:
    """Returns the key and the load of each row."""
    return [(key, (requests, tokens)) for key, requests, tokens in ROW.iter_unpack(rows)]


def blocks(*runs: tuple[int, Sequence[int]]) -> Blocks:
    """Returns the blocks of a message. `runs`: the key of an endpoint, and hashes."""
    endpoints, counts, hashes = array("Q"), array("H"), array("Q")
    for endpoint, run in runs:
        endpoints.append(endpoint)
        counts.append(len(run))
        hashes.extend(run)
    return Blocks(endpoints.tobytes(), counts.tobytes(), hashes.tobytes())


def runs_of(told: Blocks | None) -> list[tuple[int, list[int]]]:
    """Returns the runs of `blocks`; none if there are no blocks."""
    if told is None:
        return []
    hashes = iter(memoryview(told.hashes).cast("Q").tolist())
    endpoints, counts = (memoryview(part).cast(kind) for part, kind in ((told.endpoints, "Q"), (told.counts, "H")))
    return [(endpoint, [next(hashes) for _ in range(count)]) for endpoint, count in zip(endpoints, counts, strict=True)]


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
