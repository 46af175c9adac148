"""The messages between replicas: what they contain, their bytes, and their limits.

    message   | form | name | epoch | origin | sequence | whole | secret | loads | flow | learned | taken back | wants | pages |
                budgets | flows |                                    msgpack, an array
    loads     | endpoint u64 | requests u32 | tokens u64 | ...       the values of now, so a repeated row changes nothing
    flow      | (priority, requests, bytes) ... | progress |         what waits in each band
    learned, taken back | endpoint u64 ... | number of hashes u16 ... | hash u64 ... |      one endpoint and number per run of hashes;
                                                                     what the sender's workers have taught its prefix index
    pages     | columns | width | rows |                             metrics pages that the sender has read
    row       | endpoint u64 | age in us u32 | requests u32 | present u64 | value f64 ... |    as many values as the width says

    flows     (pool, flow) ...                                       the waiting requests of each of several pools
    budgets   | tenant u64 | tokens f64 | requests f64 | in flight u32 | seconds until full f32, f32 | ...
                                                                     the use of tenants with a budget since the sender's start, and
                                                                     when their buckets of tokens and requests are full

- An endpoint is named by a hash of `uid@host:port`, or of `pool/uid@host:port` if the sender has several pools: slots and numbers of pools
  differ between replicas, and another pod may take over an address. A pool is named by a hash of its name; the only pool has 0. All numbers
  are little-endian.
- A message is *whole* if it has the loads of all endpoints with load. Any other message has only the rows that have changed.
- `epoch` is the number that the store gave to the sender's connection; `origin` is random and decides between equal epochs.
- `secret` is a fingerprint of the seed of block hashes. Blocks under another seed are useless.
- `columns` is a fingerprint of the columns that are read from a page. Values of other columns are useless.
- The `requests` of a page are the requests of all replicas in flight at the endpoint when the page was asked for.
- Versions before 0.3 have no `pages`, no `budgets` and no `flows`. A reader ignores parts that it does not know at the end, and an absent
  part has its default.
- A reader trusts no value: `reading` bounds each size, and brings each number into its range.
"""

import functools
import hashlib
import struct
from typing import Annotated, Final

import msgspec
import xxhash
from msgspec import Meta

FORM: Final = 2
MESSAGE_BYTES_MAX: Final = 1 << 20
ROWS_MAX: Final = 1 << 14
REQUESTS_MAX: Final = 1 << 20  # requests of one replica in flight at one endpoint
TOKENS_MAX: Final = 1 << 40
RUNS_MAX: Final = 1 << 12  # runs of hashes of one endpoint in one message
BANDS_MAX: Final = 64
POOLS_MAX: Final = 1000  # the largest number of pools of a replica
ONLY: Final = 0  # the key of the pool of a replica with one pool
HASH_MASK: Final = (1 << 63) - 1
# endpoint, requests, tokens; messages mostly have few rows, for which this is faster than an array
ROW: Final = struct.Struct("<QIQ")

BUDGET: Final = struct.Struct("<QddIff")
BUDGETS_MAX: Final = 2048  # tenants in one message
USED_MAX: Final = 1e15  # tokens of a tenant

PAGES_MAX: Final = 128  # pages in one message; a supervisor cannot scrape faster
WIDTH_MAX: Final = 64  # values of a page
PAGE_BYTES_MAX: Final = 24 + 8 * WIDTH_MAX
AGE_US_MAX: Final = 2_000_000  # the largest age of a page, because the next page follows after 2 s
EPOCH_MAX: Final = (1 << 62) - 1
EPOCH_FOLLOWED_MAX: Final = 1 << 40  # no store counts so far; a higher number is false, and no replica goes above it

NAME_MAX: Final = 300
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # also a hash of 63 bits


class NotUsable(Exception):
    """Raised if a message cannot be used. `why` is a label of the metric that counts such messages."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Band(msgspec.Struct, array_like=True, frozen=True):
    """The waiting requests of one band."""

    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
    requests: Count
    bytes: Count


class Flow(msgspec.Struct, array_like=True, frozen=True):
    """The waiting requests in the flow control of the sender, over all its workers."""

    bands: Annotated[list[Band], Meta(max_length=BANDS_MAX)]
    progress: Count = 0  # the number of requests that its workers have let through


class PoolFlow(msgspec.Struct, array_like=True, frozen=True):
    """The waiting requests of one of several pools."""

    pool: Count
    flow: Flow


class Blocks(msgspec.Struct, array_like=True, frozen=True):
    """Blocks of the prefix index, in runs of one endpoint each: its key (u64) and the number of hashes (u16) per run, and all hashes."""

    endpoints: Annotated[bytes, Meta(max_length=8 * RUNS_MAX)]
    counts: bytes
    hashes: bytes


class PageRows(msgspec.Struct, array_like=True, frozen=True):
    """The values of metrics pages: a row of `page_row` per page."""

    columns: Count
    width: Annotated[int, Meta(ge=1, le=WIDTH_MAX)]
    rows: Annotated[bytes, Meta(max_length=PAGES_MAX * PAGE_BYTES_MAX)]


class Message(msgspec.Struct, array_like=True, frozen=True):
    """A message of one replica to the others. `flow` is None if no band has changed, or if the sender has several pools.

    `flows` has the pools with changes, or in a whole message all pools with waiting requests.
    """

    form: int
    name: Annotated[str, Meta(max_length=NAME_MAX)]
    epoch: Annotated[int, Meta(ge=0, le=EPOCH_MAX)]
    origin: Count
    sequence: Count
    whole: bool = False
    secret: Count = 0
    loads: Annotated[bytes, Meta(max_length=ROWS_MAX * ROW.size)] = b""
    flow: Flow | None = None
    learned: Blocks | None = None
    taken_back: Blocks | None = None  # applied after `learned`
    wants: bool = False  # whether the sender wants a copy of the prefix index
    pages: PageRows | None = None
    budgets: Annotated[bytes, Meta(max_length=BUDGETS_MAX * BUDGET.size)] = b""
    flows: Annotated[list[PoolFlow], Meta(max_length=POOLS_MAX)] = []


decoder = msgspec.msgpack.Decoder(Message)
encode = msgspec.msgpack.Encoder().encode


@functools.cache
def page_row(width: int) -> struct.Struct:
    """Returns the form of a page's row: endpoint, age, requests, present, and `width` values."""
    return struct.Struct(f"<QIIQ{width}d")


def endpoint_key(name: str) -> int:
    """Returns the number that names an endpoint in messages. `name`: `uid@host:port`; outside Kubernetes the uid is empty."""
    return xxhash.xxh3_64_intdigest(name.encode(errors="replace")) & HASH_MASK


def pool_key(name: str) -> int:
    """Returns the number that names one of several pools in messages."""
    return xxhash.xxh3_64_intdigest(f"pool {name}".encode(errors="replace")) & HASH_MASK or 1


def columns_key(read: str) -> int:
    """Returns a fingerprint of the columns that are read from pages."""
    return xxhash.xxh3_64_intdigest(read.encode(errors="replace")) & HASH_MASK


def secret_key(seed: int) -> int:
    """Returns a fingerprint of the seed of block hashes, from which the seed cannot be computed."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=8, person=b"replicas").digest()
    return int.from_bytes(digest, "little") & HASH_MASK or 1
