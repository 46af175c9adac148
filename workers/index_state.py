"""The prefix index and its secret over restarts of the picker, in a folder (`--state-dir`), which one picker uses at a time.

    prefix-secret   what block hashes start from, unless --prefix-secret-file gives it; mode 0600
    prefix-index    header | slice of buckets: entries, ages | ... | owners, msgpack | footer

    header          magic | version | block tokens | layout | entries | secret's fingerprint
    footer          bytes of the owners' part | CRC-32 of all before it | end mark

The supervisor writes it every `EVERY_S` if something changed, when the picker is told to stop, and at its own end: under another name,
slice by slice (copied in the loop, written by a thread), then synced and renamed. So there is a whole snapshot or none, and the loop
never waits for the disk. A bucket is as it was when its slice was copied. Owners are those that were bound to the same endpoint
when the first and when the last slice was copied.

It is read before the first endpoint is known, as a whole or not at all: a snapshot that is cut, damaged, of another secret, layout or
version, or older than `AGE_MAX_S` is refused with one line in the log. Ages go on by wall-clock time. What belongs to
endpoints that discovery does not find again is freed (`EndpointTable`).

No failure here is fatal: the picker starts with an empty index, or goes on without a snapshot, and says so once.
"""

import asyncio
import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from zlib import crc32

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from shm.index_capacity import OWNER_IDS
from shm.prefix_index import FIRST_OWNER, WAYS, IndexSchema, IndexWriter
from workers.bus import AGE_TICKS
from workers.documents import Identity

SECRET = "prefix-secret"
SNAPSHOT = "prefix-index"
SECRET_BYTES = 32
SECRET_BYTES_MIN = 16
SECRET_BYTES_MAX = 4096
EVERY_S = 60.0
LOOK_S = 0.25
CLOSE_S = 3.0  # the parent waits a little longer for the supervisor
AGE_MAX_S = 3600.0
FUTURE_MAX_S = 60.0  # clocks of two machines differ
SLICE_BUCKETS = 4096
OWNERS_BYTES_MAX = 64 << 20

VERSION = 2
MAGIC = b"EPPINDEX"
END = b"EPPWHOLE"
HEADER = Struct("=8sIIQQ16s")
FOOTER = Struct("=QI8s")
ENTRY_BYTES = 12

log = structlog.get_logger()


class RefusedSnapshot(Exception):
    """A snapshot that is not used; the text says why."""


class Owners(msgspec.Struct, array_like=True, frozen=True):
    """Behind the slices: whose entries they are, and when it was."""

    written_at: float  # wall clock
    tick: int  # of the index's clock
    owners: list[tuple[Identity, int]]


class Loaded(NamedTuple):
    """A snapshot that was taken."""

    owners: dict[Identity, int]
    age_s: float


def kept_secret(folder: str) -> bytes:
    """The secret that the folder keeps; made by the first who asks. Where it cannot be kept it is new, with a warning."""
    path = Path(folder, SECRET)
    try:
        secret = _read_secret(path)
    except (FileNotFoundError, NotADirectoryError):
        pass  # making it says what is wrong
    except OSError as refused:
        log.warning(f"--state-dir: {path} cannot be read: {refused.strerror}; prefixes start anew")
        return os.urandom(SECRET_BYTES)
    else:
        if len(secret) >= SECRET_BYTES_MIN:
            return secret
        log.warning(f"--state-dir: {path} is no secret: it has {len(secret)} bytes; it is made anew")
    secret = os.urandom(SECRET_BYTES).hex().encode()
    try:
        _replace(path, secret)
    except OSError as refused:
        log.warning(f"--state-dir: {path} cannot be written: {refused.strerror}; prefixes start anew with each restart")
    return secret


def _read_secret(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
            with contextlib.suppress(OSError):  # on a volume that is read-only, or somebody else's
                os.fchmod(descriptor, 0o600)
        return os.read(descriptor, SECRET_BYTES_MAX).strip()
    finally:
        os.close(descriptor)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    descriptor = _create(temporary)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)


def _create(path: Path) -> int:
    """A new file of mode 0600, whatever was there; its folder too."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


class IndexState:
    """One picker's snapshot. `load` first; then `run` beside the supervisor's other work, and `close` at its end."""

    def __init__(
        self,
        folder: str,
        index: IndexWriter,
        *,
        seed: int,
        block_tokens: int,
        ticks: Callable[[], int],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path = Path(folder, SNAPSHOT)
        self._index = index
        self._schema: IndexSchema = index.schema
        fingerprint = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=16, person=b"prefix index").digest()
        self._header = (MAGIC, VERSION, block_tokens, self._schema.layout_hash, self._schema.entries, fingerprint)
        self._ticks = ticks
        self._wall = wall
        self._saved = -1 if index.size() else index.changes  # a predecessor may not have come to save what it left
        self._failed = False
        self._writing = asyncio.Lock()

    def load(self) -> dict[Identity, int]:
        """Fill the index; whose entries it has now. Nothing, with a line in the log, if there is no snapshot to be used."""
        try:
            loaded = self._load()
        except FileNotFoundError:
            return {}
        except (OSError, RefusedSnapshot) as refused:
            why = refused.strerror if isinstance(refused, OSError) else str(refused)
            log.warning(f"--state-dir: the prefix index starts empty: {self._path}: {why}")
            return {}
        self._saved = self._index.changes
        log.info(
            "prefix index taken over",
            file=str(self._path),
            entries=self._index.size(),
            endpoints=len(loaded.owners),
            age_s=round(loaded.age_s, 1),
        )
        return loaded.owners

    async def run(self, owners: Callable[[], Mapping[Identity, int]], stopping: Callable[[], bool]) -> None:
        """Save again and again, and once more when the picker is told to stop; until cancelled."""
        loop = asyncio.get_running_loop()
        due, hurried = loop.time() + EVERY_S, False
        while True:
            await asyncio.sleep(LOOK_S)
            stops = stopping()
            if loop.time() >= due or (stops and not hurried):
                due, hurried = loop.time() + EVERY_S, stops
                await self.save(owners)

    async def close(self, owners: Callable[[], Mapping[Identity, int]]) -> None:
        """The last snapshot."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.save(owners)

    async def save(self, owners: Callable[[], Mapping[Identity, int]]) -> None:
        """Write a snapshot, if something has changed since the last. What fails is said once."""
        async with self._writing:
            changes = self._index.changes
            if changes == self._saved:
                return
            try:
                await self._write(owners)
            except OSError as refused:
                if not self._failed:
                    log.warning(
                        f"--state-dir: {self._path} cannot be written: {refused.strerror}; the index is not kept until it can be"
                    )
                self._failed = True
                return
            if self._failed:
                log.info("--state-dir: the prefix index is kept again", file=str(self._path))
            self._failed, self._saved = False, changes

    async def _write(self, owners: Callable[[], Mapping[Identity, int]]) -> None:
        temporary = self._path.with_name(f"{SNAPSHOT}.tmp")
        descriptor = await asyncio.to_thread(_create, temporary)
        try:
            first = dict(owners())
            checksum = await asyncio.to_thread(_append, descriptor, [HEADER.pack(*self._header)], 0)
            for bucket in range(0, self._schema.buckets, SLICE_BUCKETS):
                part = self._index.copy(bucket, SLICE_BUCKETS)
                checksum = await asyncio.to_thread(_append, descriptor, part, checksum)
            last = owners()
            same = [(identity, owner) for identity, owner in first.items() if last.get(identity) == owner]
            behind = msgspec.msgpack.encode(Owners(self._wall(), self._ticks(), same))
            checksum = await asyncio.to_thread(_append, descriptor, [behind], checksum)
            await asyncio.to_thread(_append, descriptor, [FOOTER.pack(len(behind), checksum, END)], 0)
            await asyncio.to_thread(_publish, descriptor, temporary, self._path)
        except OSError:  # when cancelled, a thread may still write: the process ends, and that closes it
            os.close(descriptor)
            with contextlib.suppress(OSError):  # a full disk is not to stay full by this
                os.unlink(temporary)
            raise
        os.close(descriptor)

    def _load(self) -> Loaded:
        content = self._read()
        length, _, _ = FOOTER.unpack_from(content, len(content) - FOOTER.size)
        slices_end = len(content) - FOOTER.size - length
        if slices_end != HEADER.size + self._schema.entries * ENTRY_BYTES:
            raise RefusedSnapshot("it is damaged: its parts do not add up")
        try:
            behind = msgspec.msgpack.decode(content[slices_end : -FOOTER.size], type=Owners)
        except msgspec.DecodeError as wrong:
            raise RefusedSnapshot(f"it is damaged: {wrong}") from wrong
        ids = [owner for _, owner in behind.owners]
        if len(set(ids)) != len(ids) or not all(FIRST_OWNER <= owner < OWNER_IDS for owner in ids):
            raise RefusedSnapshot("it is damaged: its owners are no owners")
        age_s = self._wall() - behind.written_at
        if age_s > AGE_MAX_S:
            raise RefusedSnapshot(f"it is {age_s / 3600:.1f} hours old: after 1 hour servers hold other prefixes")
        if age_s < -FUTURE_MAX_S:
            raise RefusedSnapshot(f"it was written {-age_s:.0f} seconds from now: the clock was set back")
        entries, ages = self._arrays(content)
        self._index.load(entries, ages, ids, self._ticks() - int(max(age_s, 0.0) * AGE_TICKS) - behind.tick)
        return Loaded(dict(behind.owners), age_s)

    def _read(self) -> bytes:
        """The file, if it is whole and for this picker."""
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            head = file.read(HEADER.size) if stat.S_ISREG(status.st_mode) else b""
            self._meant_for_us(head)
            most = HEADER.size + self._schema.entries * ENTRY_BYTES + OWNERS_BYTES_MAX + FOOTER.size
            if status.st_size > most:
                raise RefusedSnapshot(
                    f"it is damaged: it has {status.st_size} bytes, and {most} are the most it can have"
                )
            content = head + file.read(most)
        if len(content) < HEADER.size + FOOTER.size or not content.endswith(END):
            raise RefusedSnapshot(f"it is cut off: its {len(content)} bytes have no end mark")
        _, checksum, _ = FOOTER.unpack_from(content, len(content) - FOOTER.size)
        if crc32(memoryview(content)[: -FOOTER.size]) != checksum:
            raise RefusedSnapshot("it is damaged: its checksum differs")
        return content

    def _meant_for_us(self, head: bytes) -> None:
        if not head.startswith(MAGIC):
            raise RefusedSnapshot("it is no snapshot of a prefix index")
        if len(head) < HEADER.size:
            raise RefusedSnapshot(f"it is cut off: it has {len(head)} bytes")
        _, version, block_tokens, layout, entries, secret = HEADER.unpack(head)
        _, own_version, own_block_tokens, own_layout, own_entries, own_secret = self._header
        if version != own_version:
            raise RefusedSnapshot(f"it is of version {version}, and this picker reads version {own_version}")
        if entries != own_entries:
            raise RefusedSnapshot(f"it has {entries} entries, and this picker's index {own_entries} (--index-entries)")
        if layout != own_layout:
            raise RefusedSnapshot("the index had another layout when it was written")
        if block_tokens != own_block_tokens:
            raise RefusedSnapshot(
                f"its blocks have {block_tokens} tokens, and this picker's {own_block_tokens} (blockSizeTokens)"
            )
        if secret != own_secret:
            raise RefusedSnapshot("it was made under another prefix secret")

    def _arrays(self, content: bytes) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """All entries and ages, of all slices."""
        entries, ages = [], []
        at = HEADER.size
        for bucket in range(0, self._schema.buckets, SLICE_BUCKETS):
            count = min(SLICE_BUCKETS, self._schema.buckets - bucket) * WAYS
            entries.append(np.frombuffer(content, np.uint64, count, at))
            at += count * 8
            ages.append(np.frombuffer(content, np.uint32, count, at))
            at += count * 4
        return np.concatenate(entries), np.concatenate(ages)


def _append(descriptor: int, parts: Sequence[bytes], checksum: int) -> int:
    """The checksum with these."""
    for part in parts:
        checksum = crc32(part, checksum)
        left = memoryview(part)
        while len(left):
            left = left[os.write(descriptor, left) :]
    return checksum


def _publish(descriptor: int, temporary: Path, path: Path) -> None:
    """From here on it is the snapshot, whatever happens."""
    os.fsync(descriptor)
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
