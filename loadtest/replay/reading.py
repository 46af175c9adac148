"""Reads a recording into what a replay needs: requests in the order of arrival, endpoints with their times, and the scraped values."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from epp.data import CACHE_BLOCK_SIZE, CACHE_NUM_BLOCKS, CACHE_TOKENS, RUNNING, WAITING
from epp.recording.records import Configured, Decided, Ended, Member, Scraped, floats, ints
from epp.recording.trace import Slot, Trace, Traced
from loadtest.replay.runs import HASH_BYTES
from workers.shared.recording import Unreadable
from workers.shared.recording.lengths import Lengths, is_streamed
from workers.shared.recording.reader import batches_of_pool

REQUESTS_MAX: Final = 1_000_000
NAN: Final = math.nan
UNREACHABLE: Final = 4  # in a state of `Scraped`: the endpoint is down; an ejected one may still answer
SHOWN_EVERY: Final = 20_000  # requests
WARM_S: Final = 600.0  # what servers held before the recording is looked for in the requests of this time


class Asked(msgspec.Struct, frozen=True, gc=False):
    """One recorded request. Times are in seconds: `at` is on the monotonic clock of the recording, and the other times begin at `at`.

    `prompt_tokens`: tokens of the prompt as the picker counted them; `prompt`: as the server counted them, or else the same. `output`:
    tokens of the answer, reported or estimated (`workers.shared.recording.lengths`); None if unknown. `facts`: a keyed hash for each header
    that plugins read; 0 if the request had no such header. `target`: the index of the endpoint that served the request; -1 if none did.
    `first_s`, `lasted_s`: NaN if there was no answer. `cached`: the cached tokens that the server reported; None if it did not report them.
    `expected`: tokens that the picker expected to be cached at the target. `answered`: whether the recording has a server's whole answer.
    `held`: the endpoints that were predicted to hold leading blocks of the prompt, and how many blocks; empty for requests after the first
    WARM_S.
    """

    at: float
    model: str
    target_model: str
    flow: int
    priority: int
    ttl_s: float | None
    streaming: bool
    body_bytes: int
    max_tokens: int | None
    prompt_tokens: int
    block_tokens: int
    hashes: bytes
    facts: tuple[int, ...]
    headers: tuple[str, ...]
    waited_s: float
    prompt: int
    output: int | None
    target: int
    first_s: float
    lasted_s: float
    cached: int | None
    expected: int
    answered: bool
    held: tuple[tuple[int, int], ...] = ()

    def whole_blocks(self) -> bytes:
        """Returns the hashes of the blocks of the request's prompt, without the last one if that block is shorter than the others."""
        whole = self.prompt_tokens // self.block_tokens if self.block_tokens else 0
        return self.hashes[: whole * HASH_BYTES]

    @property
    def server_block_tokens(self) -> float:
        """Returns the tokens of a block in the server's count, which may differ from the picker's count."""
        return self.block_tokens * self.prompt / self.prompt_tokens if self.prompt_tokens else 1.0


class Sight:
    """What scrapes showed of one endpoint: how often it ran n requests (`looks[n]`), and how often others waited then (`full[n]`)."""

    def __init__(self) -> None:
        self.cache_tokens = 0
        self.looks: Counter[int] = Counter()
        self.full: Counter[int] = Counter()
        self.down: list[list[float]] = []  # [since, until] of each time when the endpoint was down; the last entry may lack its end


class Lifetime(msgspec.Struct, frozen=True):
    """An endpoint, and the time during which it was there. `down`: (since, until) of the times when it did not answer. Times are those of
    `Asked.at`.
    """

    member: Member
    joined_at: float
    left_at: float
    down: tuple[tuple[float, float], ...]


class Recording(msgspec.Struct, frozen=True):
    """A recording: its requests in the order of arrival, its endpoints, and what scrapes said of each of them."""

    asked: list[Asked]
    endpoints: list[Lifetime]
    sights: list[Sight]
    configs: Mapping[int, Configured]
    lost: int


def read(path: str, warn: Callable[[str], object], progress: Callable[[int], object], pool: str = "") -> Recording:
    """Reads a file or a folder. `pool`: which pool to read, if there are several. `warn` gets a sentence for each part that is unreadable.

    Raises Unreadable.
    """
    reading = _Reading()
    for batch in batches_of_pool(path, warn, pool):
        for record in batch:
            reading.add(record)
        if len(reading.asked) > REQUESTS_MAX:
            raise Unreadable(f"{path}: more than {REQUESTS_MAX:,} requests: give one file of the folder")
        progress(len(reading.asked))
    found = reading.end(warn)
    if not found.asked:
        raise Unreadable(f"{path}: the recording has no requests")
    if not found.endpoints:
        raise Unreadable(f"{path}: the recording describes no endpoints")
    return found


class _Reading:
    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self._lengths = Lengths()
        self._estimated: list[tuple[int, int]] = []  # position in `asked`, bytes of the answer
        self._trace = Trace()
        self._columns: list[str] = []
        self._places: dict[Slot, int] = {}
        self._members: list[Member] = []
        self._times: list[list[float]] = []
        self._sights: list[Sight] = []
        self._warm_until = -math.inf

    def add(self, record: object) -> None:
        if isinstance(record, Scraped):
            self._scraped(record)
            return
        if isinstance(record, Member):
            self._member(record)
        traced = self._trace.add(record)  # type: ignore[arg-type]
        if traced is not None:
            self._add(traced)

    def end(self, say: Callable[[str], object]) -> Recording:
        for traced in self._trace.unfinished():
            self._add(traced)
        told = self._lengths.told()
        if told.estimated:
            say(str(told))
        for at, size in self._estimated:
            output = self._lengths.output(self.asked[at].model, size)
            self.asked[at] = msgspec.structs.replace(self.asked[at], output=output)
        self.asked.sort(key=lambda asked: asked.at)
        endpoints = [
            Lifetime(member, joined, left, tuple((since, until) for since, until in sight.down))
            for member, (joined, left), sight in zip(self._members, self._times, self._sights, strict=True)
        ]
        return Recording(self.asked, endpoints, self._sights, self._trace.configs, self._trace.lost)

    def _member(self, record: Member) -> None:
        key = (record.slot, record.generation)
        place = self._places.get(key)
        if not record.joined:
            if place is not None:
                self._times[place][1] = record.at
            return
        if place is None:
            self._places[key] = len(self._members)
            self._members.append(record)
            self._times.append([record.at, math.inf])
            self._sights.append(Sight())

    def _scraped(self, record: Scraped) -> None:
        self._columns = record.columns or self._columns
        slots = ints(record.slots).tolist()
        rows = floats(record.values).reshape(len(slots), -1).tolist() if slots else []
        for slot, row, state in zip(slots, rows, record.states, strict=True):
            member = self._trace.here.get(slot)
            if member is None:
                continue
            sight = self._sights[self._places[slot, member.generation]]
            _look(sight, dict(zip(self._columns, row, strict=False)), state, record.at)

    def _add(self, traced: Traced) -> None:
        ended = traced.ended
        if ended is not None and is_streamed(ended):
            self._lengths.add(traced.decided.model, ended)
            if ended.completion is None:
                self._estimated.append((len(self.asked), ended.answer_bytes))
        self.asked.append(self._asked(traced))

    def _asked(self, traced: Traced) -> Asked:
        decided, ended = traced.decided, traced.ended
        target = traced.target()
        place = -1 if target is None else self._places.get((target.slot, target.generation), -1)
        answered = ended is not None and ended.status == 200 and ended.whole and ended.first_s == ended.first_s
        known = ended is not None and ended.prompt is not None
        return Asked(
            decided.at, decided.model, decided.target_model, decided.flow, decided.priority, decided.ttl_s,
            decided.streaming, decided.body_bytes, decided.max_tokens, decided.prompt_tokens, decided.block_tokens,
            decided.hashes, tuple(decided.facts), tuple(traced.config.headers) if traced.config is not None else (),
            decided.waited_s,
            ended.prompt if known else decided.prompt_tokens,  # type: ignore[arg-type, union-attr]
            ended.completion if ended is not None else None,
            place,
            ended.first_s if ended is not None else NAN,
            ended.lasted_s if ended is not None else NAN,
            ended.cached if ended is not None else None,
            _expected(traced, decided, ended),
            bool(answered and place >= 0),
            self._held(traced),
        )  # fmt: skip

    def _held(self, traced: Traced) -> tuple[tuple[int, int], ...]:
        decided = traced.decided
        if self._warm_until < 0.0:
            self._warm_until = decided.at + WARM_S
        if decided.matched is None or decided.at > self._warm_until:
            return ()
        return tuple(
            (self._places[member.slot, member.generation], int(blocks))
            for member, blocks in zip(traced.endpoints, floats(decided.matched).tolist(), strict=True)
            if member is not None and blocks > 0
        )


def _expected(traced: Traced, decided: Decided, ended: Ended | None) -> int:
    """Returns the number of tokens that the picker expected the target to have cached."""
    if decided.matched is None or ended is None:
        return 0
    for row, member in enumerate(traced.endpoints):
        if member is not None and member.slot == ended.slot:
            return int(floats(decided.matched)[row]) * decided.block_tokens
    return 0


def _look(sight: Sight, row: Mapping[str, float], state: int, at: float) -> None:
    blocks = row.get(CACHE_BLOCK_SIZE.name, NAN) * row.get(CACHE_NUM_BLOCKS.name, NAN)
    size = row.get(CACHE_TOKENS.name, blocks)
    if size > 0:
        sight.cache_tokens = int(size)
    running = row.get(RUNNING.name, NAN)
    if running >= 1:
        sight.looks[int(running)] += 1
        sight.full[int(running)] += row.get(WAITING.name, 0.0) > 0
    is_down = bool(state & UNREACHABLE)
    if is_down and not (sight.down and sight.down[-1][1] == math.inf):
        sight.down.append([at, math.inf])
    elif not is_down and sight.down and sight.down[-1][1] == math.inf:
        sight.down[-1][1] = at
