"""The state of configuration reloads: the parent publishes it, and pages and commands read it.

Each of several pools has a document of its own, and the last one is about the list of pools.
"""

from typing import Final

import msgspec

from epp.decision.tryout import Share, Side
from shm.documents import DocumentReader, DocumentSchema

STATUS_BYTES: Final = 64 << 10
TEXT_MAX: Final = 16 << 10
POOL_STATUS_BYTES: Final = 5 << 10  # of one of several pools
POOL_TEXT_MAX: Final = 1 << 10


def schema(pools: int | None) -> DocumentSchema:
    """Returns the schema of the documents. `pools`: the number of places for pools; None: there is only one pool, and no list."""
    return DocumentSchema((*[POOL_STATUS_BYTES] * (pools or 0), STATUS_BYTES))


class TryoutStatus(msgspec.Struct, frozen=True, array_like=True):
    """The candidate that is tried beside the configuration in force, and the counts since its first request.

    `in_force`, `candidate`: the counts of each configuration. `agreed`, `differed`, `failed`: numbers of shadow decisions.
    """

    generation: int
    hash: str
    source: str
    share: Share
    since: float
    in_force: Side = Side()
    candidate: Side = Side()
    agreed: int = 0
    differed: int = 0
    failed: int = 0


class ReloadStatus(msgspec.Struct, frozen=True, array_like=True):
    """The configuration in force, and the last attempt to change it. Times are in seconds since the epoch.

    `finished`: how many attempts have ended. `busy`: whether an attempt is under way. `text`: the findings of the last attempt.
    `tryout`: the candidate that is tried; None without one. Trying, promoting and rolling back a candidate count as attempts, too.
    `answered`: how many attempts that somebody has asked for have ended. `owed`: whether one of these is under way.
    `text_of_pools`: whether `text` has a line for each pool: that of the list of pools, after all of them were reloaded.
    """

    generation: int
    hash: str
    source: str
    since: float
    finished: int = 0
    busy: bool = False
    successful: bool = True
    at: float = 0.0
    text: str = ""
    tryout: TryoutStatus | None = None
    answered: int = 0
    owed: bool = False
    text_of_pools: bool = False


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ReloadStatus).decode


def read(reader: DocumentReader, key: int = 0) -> ReloadStatus | None:
    """Returns the present status; None if there is none yet, or if it was written by another version of this program.

    `key`: the number of a pool, or that of the list of pools.
    """
    found = reader.read(key)
    if found is None:
        return None
    try:
        return _decode(found[1])
    except msgspec.MsgspecError:
        return None
