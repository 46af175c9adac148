"""Keeps the configurations of a running picker: the one in force, the last ones before it, and a candidate that is tried beside it.

    trial child ─ result ─▶ a file in memory ◀─ read ─ workers, supervisor, kv-events
    parent ─ publish ─▶ a word: the number of the configuration in force, and that of its file
             try_out ─▶ a word: the same two numbers of the candidate

Each configuration that was ever in force has a number, its *generation*. A file holds everything that a process needs to use the
configuration: the text, the plugin files, the API keys, and the names that have places in shared memory
(`workers.process.layout.Names`). So all processes use the same bytes, even if the files on disk change meanwhile. The files have no
names (memfd). The parent creates them before the first fork, and children inherit them.

The parent changes the configuration of the picker with one store to a word in shared memory. So every process finds the old or the new
number, never a mixture, even if the parent is killed. A trial child writes only a file that no word names yet.
"""

import contextlib
import hashlib
import os
import zlib
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from epp.decision.tryout import Share
from workers.process.asks import Ask
from workers.process.names import Names
from workers.process.resources import Words
from workers.process.rollout import SLOTS

BUNDLE_BYTES_MAX: Final = 16 << 20
SLOT_BITS: Final = 8
SUM_BYTES: Final = 4


class Given(NamedTuple):
    """A configuration as it was read. `text`: its YAML; None stands for the built-in configuration. `plugins`: the plugin files by name.

    `keys`: the texts of its files of API keys, by path; None: they are read when the configuration is loaded, which names them.
    """

    text: str | None
    source: str
    plugins: dict[str, bytes]
    keys: Mapping[str, str] | None = None


class Bundle(msgspec.Struct, frozen=True, array_like=True):
    """One configuration. `text`: its YAML; None stands for the built-in configuration. `plugins`: the files in `plugin_path` by name.

    `keys`: the texts of its files of API keys, by path.

    `followed`: whether it was read from the files that the picker follows. False for a candidate, and for an earlier configuration that
    is in force again. `share`: the requests that it decides while it is a candidate.
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

    @property
    def hash(self) -> str:
        """Identifies the text, the plugin files and the keys. If all are equal, so are the hashes of two configurations."""
        parts = [self.text, sorted(self.plugins.items()), *([sorted(self.keys.items())] if self.keys else [])]
        digest = hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=6)
        return digest.hexdigest()


class Result(msgspec.Struct, frozen=True, array_like=True):
    """The result of a trial. `bundle`: the configuration, None if it is refused. `text`: the errors or warnings.

    `pid`: the process id of the trial child.
    """

    pid: int
    text: str
    bundle: Bundle | None = None


class Attempt(NamedTuple):
    """What a trial child gets.

    `slot`: the number of the file into which it writes its result. `number`: the number that the configuration gets if it is good.
    `names`: the columns, histograms and plugin counters that have places in shared memory already; the trial keeps these.
    `ask`: the command to carry out; None: to read the picker's files again.
    """

    slot: int
    number: int
    names: Names
    ask: Ask | None = None


class GenerationLost(Exception):
    """The file of a generation no longer holds it, because a later generation uses the file."""


class Generations:
    """Reads and writes the files of configurations, and the two words: one names the configuration in force, the other the candidate."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._files = [os.memfd_create(f"epp generation {slot}", os.MFD_CLOEXEC) for slot in range(SLOTS)]

    @property
    def number(self) -> int:
        """The number of the configuration that is in force. 0 before the first `publish`."""
        return self._words.generation >> SLOT_BITS

    @property
    def candidate_number(self) -> int:
        """The number of the candidate that is tried beside the configuration in force; 0: none."""
        return self._words.candidate >> SLOT_BITS

    def current(self) -> Bundle:
        """Returns the configuration in force. Raises GenerationLost."""
        return self._named(self._words.generation)

    def candidate(self) -> Bundle:
        """Returns the candidate that is tried. Raises GenerationLost."""
        return self._named(self._words.candidate)

    def hash_of(self, number: int) -> str:
        """Returns the hash of the configuration with this number, which is in force or a candidate; "" if it is neither any more."""
        for word in (self._words.generation, self._words.candidate):
            with contextlib.suppress(GenerationLost):
                if word >> SLOT_BITS == number:
                    return self._named(word).hash
        return ""

    def bundle(self, slot: int) -> Bundle:
        """Returns the configuration in a file. Raises GenerationLost if there is none."""
        result = self.result(slot)
        if result is None or result.bundle is None:
            raise GenerationLost(f"file {slot} has no configuration")
        return result.bundle

    def _named(self, word: int) -> Bundle:
        bundle = self.bundle(word & (1 << SLOT_BITS) - 1)
        if bundle.number != word >> SLOT_BITS:
            raise GenerationLost(f"generation {word >> SLOT_BITS} is gone")
        return bundle

    def store(self, slot: int, result: Result) -> None:
        """Stores a result in a file. Raises ValueError if it is too large."""
        blob = msgspec.msgpack.encode(result)
        if len(blob) > BUNDLE_BYTES_MAX:
            raise ValueError(
                f"configuration, plugin files and keys have {len(blob)} bytes together; at most {BUNDLE_BYTES_MAX} are possible"
            )
        file = self._files[slot]
        os.ftruncate(file, 0)
        os.pwrite(file, zlib.crc32(blob).to_bytes(SUM_BYTES, "little"), 0)
        written = 0
        while written < len(blob):
            written += os.pwrite(file, blob[written:], SUM_BYTES + written)

    def result(self, slot: int) -> Result | None:
        """Returns the result in a file. Returns None if the file is empty, or was written in part."""
        file = self._files[slot]
        size = os.fstat(file).st_size
        if not SUM_BYTES < size <= BUNDLE_BYTES_MAX + SUM_BYTES:
            return None
        data = os.pread(file, size, 0)
        blob = data[SUM_BYTES:]
        if zlib.crc32(blob).to_bytes(SUM_BYTES, "little") != data[:SUM_BYTES]:
            return None
        try:
            return msgspec.msgpack.decode(blob, type=Result)
        except msgspec.MsgspecError:
            return None

    def clear(self, slot: int) -> None:
        """Empties a file."""
        os.ftruncate(self._files[slot], 0)

    def publish(self, slot: int, number: int) -> None:
        """Makes the configuration in file `slot` the one in force. Only the parent calls this."""
        self._words.generation = number << SLOT_BITS | slot

    def try_out(self, slot: int, number: int) -> None:
        """Makes the configuration in file `slot` the candidate. Only the parent calls this."""
        self._words.candidate = number << SLOT_BITS | slot

    def withdraw(self) -> None:
        """Ends the use of the candidate. Only the parent calls this."""
        self._words.candidate = 0

    def close(self) -> None:
        """Closes the files in this process."""
        for file in self._files:
            os.close(file)
