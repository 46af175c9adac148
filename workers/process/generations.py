"""Keeps the configurations of a running picker: the one in force, the last ones before it, and a candidate that is tried beside it.

    trial child ─ result ─▶ a file in memory ◀─ read ─ workers, supervisor, kv-events
    parent ─ publish ─▶ a word: the number of the configuration in force, and the number of its file
             try_out ─▶ a word: the same two numbers of the candidate

Each configuration that was ever in force has a number, its *generation*. A file holds everything that a process needs to use the
configuration: the text, the plugin files, the API keys, and the names that have places in shared memory
(`workers.process.layout.Names`). So all processes use the same bytes, even if the files on disk change meanwhile. The files are parts of
one file without a name (memfd). The parent creates it before the first fork, and children inherit it.

If the picker has several pools, each pool has its own configurations, and the list of pools has its own configurations, too
(`workers.process.pool_list`).

The parent changes the configuration of the picker with one store to a word in shared memory. So every process finds either the old or the
new number, even if the parent is killed. A trial child writes only files that no word names yet.
"""

import contextlib
import hashlib
import mmap
import os
import zlib
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from epp.decision.tryout import Share
from workers.process.asks import Ask
from workers.process.names import Names
from workers.process.pool_list import Listed
from workers.process.resources import Words
from workers.process.rollout import RELOAD, SLOTS

BUNDLE_BYTES_MAX: Final = 16 << 20
SLOT_BITS: Final = 8
SUM_BYTES: Final = 4
HEAD_BYTES: Final = 2 * SUM_BYTES  # the length of a part, and the sum of its bytes
PART_BYTES: Final = BUNDLE_BYTES_MAX + (1 << 16)


class Given(NamedTuple):
    """A configuration as it was read. `text`: its YAML; None stands for the built-in configuration. `plugins`: the plugin files by name.

    `keys`: the texts of its files of API keys, by path. None if the files are not read yet: loading the configuration reads them.
    """

    text: str | None
    source: str
    plugins: dict[str, bytes]
    keys: Mapping[str, str] | None = None


class Bundle(msgspec.Struct, frozen=True, array_like=True):
    """One configuration. `text`: its YAML; None stands for the built-in configuration. `plugins`: the files in `plugin_path` by name.

    `keys`: the texts of its files of API keys, by path.

    `pool`: the name of the pool that the configuration is for; "" if the picker has one pool. `pool_list`: set if this is the list of the
    pools (`workers.process.pool_list`).

    `followed`: whether the configuration was read from the files that the picker follows. False for a candidate, and for an earlier
    configuration that is in force again. `share`: which requests the configuration decides while it is a candidate. `foreign`: the names of
    its foreign plugins, for a parent that has not loaded it.
    """

    number: int
    source: str
    text: str | None
    plugin_path: str
    plugins: dict[str, bytes]
    names: Names
    at: float  # when the picker accepted it, in seconds since the epoch
    followed: bool = True
    share: Share = Share()
    keys: dict[str, str] = {}
    pool: str = ""
    pool_list: dict[int, Listed] | None = None
    foreign: tuple[str, ...] = ()

    @property
    def given(self) -> Given:
        """Returns the configuration as it was read."""
        return Given(self.text, self.source, self.plugins, self.keys)

    @property
    def hash(self) -> str:
        """Returns the hash of the text, the plugin files and the keys, or of the list of pools."""
        parts: list[object] = [self.text, sorted(self.plugins.items()), *([sorted(self.keys.items())] if self.keys else [])]
        if self.pool_list is not None:
            parts.append(sorted(self.pool_list.items()))
        digest = hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=6)
        return digest.hexdigest()


class TrialResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of a trial. `bundle`: the configuration; None if the trial refused the configuration. `text`: the errors or warnings.

    `pid`: the process id of the trial child. `changed`: for a trial of the list of pools, the places of the pools with changed
    configurations.
    """

    pid: int
    text: str
    bundle: Bundle | None = None
    changed: tuple[int, ...] = ()


class Attempt(NamedTuple):
    """The task of a trial child.

    `key`: the number of the pool, or the key of the list of pools. `slot`: the number of the file for the result. `number`: the number that
    the configuration gets if the trial accepts it. `names`: the columns, histograms and plugin counters that have places in shared memory
    already; the trial keeps these places. `ask`: the command to carry out: to try a candidate, or to read the picker's files again.
    """

    slot: int
    number: int
    names: Names
    ask: Ask = RELOAD
    key: int = 0


class GenerationLost(Exception):
    """Raised if the file of a generation has another content, because a later generation uses the file."""


class Files:
    """The files of all configurations: one file in memory without a name, with SLOTS parts for each. Only used parts take memory."""

    def __init__(self) -> None:
        self._file = os.memfd_create("epp generations", os.MFD_CLOEXEC)

    def write(self, part: int, blob: bytes) -> None:
        """Writes a part: its length and sum are written last, so that a part with an unfinished write is treated as empty."""
        at = part * PART_BYTES
        self.clear(part)
        written = 0
        while written < len(blob):
            written += os.pwrite(self._file, blob[written:], at + HEAD_BYTES + written)
        os.pwrite(self._file, len(blob).to_bytes(SUM_BYTES, "little") + zlib.crc32(blob).to_bytes(SUM_BYTES, "little"), at)

    def read(self, part: int) -> bytes | None:
        """Returns the content of a part. Returns None if the part is empty or its last write did not finish."""
        at = part * PART_BYTES
        head = os.pread(self._file, HEAD_BYTES, at)
        size = int.from_bytes(head[:SUM_BYTES], "little")
        if not 0 < size <= BUNDLE_BYTES_MAX:
            return None
        blob = os.pread(self._file, size, at + HEAD_BYTES)
        return blob if zlib.crc32(blob).to_bytes(SUM_BYTES, "little") == head[SUM_BYTES:] else None

    def clear(self, part: int) -> None:
        """Empties a part, and gives its memory back."""
        at, size = part * PART_BYTES, int.from_bytes(os.pread(self._file, SUM_BYTES, part * PART_BYTES), "little")
        os.pwrite(self._file, bytes(HEAD_BYTES), at)
        if size > mmap.PAGESIZE:
            with mmap.mmap(self._file, HEAD_BYTES + size, offset=at) as mapped, contextlib.suppress(OSError):
                mapped.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Closes the file in this process."""
        os.close(self._file)


class Generations:
    """Reads and writes the configurations of one pool, and the two words: one names the configuration in force, the other the candidate."""

    def __init__(self, words: Words, key: int = 0, files: Files | None = None) -> None:
        """`key`: the number of the pool, or the key of the list of pools. `files`: the files that all pools share; if None, creates these
        files.
        """
        self._words = words
        self._in_force, self._candidate = 2 * key, 2 * key + 1
        self._first = SLOTS * key
        self._files = files if files is not None else Files()
        self.key = key

    def of(self, key: int) -> "Generations":
        """Returns the configurations of another pool, or the list of pools."""
        return Generations(self._words, key, self._files)

    @property
    def number(self) -> int:
        """Returns the number of the configuration in force; 0 before the first `publish`."""
        return self._words.configurations[self._in_force] >> SLOT_BITS

    @property
    def candidate_number(self) -> int:
        """Returns the number of the candidate; 0 if there is no candidate."""
        return self._words.configurations[self._candidate] >> SLOT_BITS

    def current(self) -> Bundle:
        """Returns the configuration in force. Raises GenerationLost."""
        return self._named(self._words.configurations[self._in_force])

    def candidate(self) -> Bundle:
        """Returns the candidate. Raises GenerationLost."""
        return self._named(self._words.configurations[self._candidate])

    def hash_of(self, number: int) -> str:
        """Returns the hash of the configuration with this number; "" if the configuration is neither in force nor a candidate."""
        for place in (self._in_force, self._candidate):
            word = self._words.configurations[place]
            with contextlib.suppress(GenerationLost):
                if word >> SLOT_BITS == number:
                    return self._named(word).hash
        return ""

    def bundle(self, slot: int) -> Bundle:
        """Returns the configuration in a file. Raises GenerationLost if the file has no configuration."""
        result = self.result(slot)
        if result is None or result.bundle is None:
            raise GenerationLost(f"file {slot} has no configuration")
        return result.bundle

    def _named(self, word: int) -> Bundle:
        bundle = self.bundle(word & (1 << SLOT_BITS) - 1)
        if bundle.number != word >> SLOT_BITS:
            raise GenerationLost(f"generation {word >> SLOT_BITS} is gone")
        return bundle

    def store(self, slot: int, result: TrialResult) -> None:
        """Stores a result in a file. Raises ValueError if it is too large."""
        blob = msgspec.msgpack.encode(result)
        if len(blob) > BUNDLE_BYTES_MAX:
            raise ValueError(
                f"configuration, plugin files and keys have {len(blob)} bytes together; at most {BUNDLE_BYTES_MAX} are possible"
            )
        self._files.write(self._first + slot, blob)

    def result(self, slot: int) -> TrialResult | None:
        """Returns the result in a file. Returns None if the file is empty or its last write did not finish."""
        blob = self._files.read(self._first + slot)
        try:
            return None if blob is None else msgspec.msgpack.decode(blob, type=TrialResult)
        except msgspec.MsgspecError:
            return None

    def clear(self, slot: int) -> None:
        """Empties a file."""
        self._files.clear(self._first + slot)

    def publish(self, slot: int, number: int) -> None:
        """Makes the configuration in file `slot` the one in force. Only the parent calls this."""
        self._words.change(self._in_force, number << SLOT_BITS | slot)

    def try_out(self, slot: int, number: int) -> None:
        """Makes the configuration in file `slot` the candidate. Only the parent calls this."""
        self._words.change(self._candidate, number << SLOT_BITS | slot)

    def withdraw(self) -> None:
        """Ends the use of the candidate. Only the parent calls this."""
        self._words.change(self._candidate, 0)

    def close(self) -> None:
        """Closes the files in this process."""
        self._files.close()
