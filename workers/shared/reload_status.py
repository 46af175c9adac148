"""The state of configuration reloads: the parent publishes it, and pages and commands read it.

If the picker has several pools, each pool has its own document, and the last document is about the list of pools.
"""

from typing import Final

import msgspec

from epp.decision.tryout import Share, Side
from shm.documents import DocumentReader, DocumentSchema

STATUS_BYTES: Final = 64 << 10
TEXT_MAX: Final = 16 << 10
POOL_STATUS_BYTES: Final = 5 << 10  # the size of the document of one of several pools
POOL_TEXT_MAX: Final = 1 << 10


def schema(pools: int | None) -> DocumentSchema:
    """Returns the schema of the documents. `pools`: the number of places for pools; None if the picker has one pool."""
    return DocumentSchema((*[POOL_STATUS_BYTES] * (pools or 0), STATUS_BYTES))


class TryoutStatus(msgspec.Struct, frozen=True, array_like=True):
    """The candidate beside the configuration in force, and the counts since the candidate's first request.

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

    `finished`: how many attempts have ended. `busy`: whether an attempt is under way. `text`: the findings of the last attempt. `tryout`:
    the candidate and its counts, or None. Trying, promoting and rolling back a candidate are attempts, too. `answered`: how many attempts
    by command have ended. `owed`: whether an attempt by command is under way. `text_of_pools`: whether `text` has a line for each pool. The
    list of pools has such a text after a reload of all pools.
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
SOURCE_BYTES: Final = 512  # of a path that is shortened


def fitting(status: ReloadStatus, room: int) -> bytes:
    """Encodes a status. If it has more than `room` bytes, shortens its paths, and then its text, so that it can always be written."""
    blob = encode(status)
    if len(blob) <= room:
        return blob
    tryout = status.tryout
    if tryout is not None:
        tryout = msgspec.structs.replace(tryout, source=_cut(tryout.source, SOURCE_BYTES))
    status = msgspec.structs.replace(status, source=_cut(status.source, SOURCE_BYTES), tryout=tryout)
    over = len(encode(status)) - room
    return encode(msgspec.structs.replace(status, text=_cut(status.text, len(status.text.encode()) - max(over, 0))))


def _cut(text: str, size: int) -> str:
    """Returns the beginning of the text, with at most `size` bytes."""
    return text.encode()[: max(size, 0)].decode(errors="ignore")


_decode = msgspec.msgpack.Decoder(ReloadStatus).decode


def read(reader: DocumentReader, key: int = 0) -> ReloadStatus | None:
    """Returns the present status. Returns None if there is no status yet, or if another version of this program wrote it.

    `key`: the number of a pool, or the key of the list of pools.
    """
    found = reader.read(key)
    if found is None:
        return None
    try:
        return _decode(found[1])
    except msgspec.MsgspecError:
        return None
