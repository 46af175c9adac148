"""CPU profiles of workers: how the supervisor asks for a profile, and how the worker answers.

    supervisor  writes a question into its area and wakes the worker through its eventfd
    worker      samples its stack for the asked time (`workers.worker.profiler`), publishes the profile as its document, and then
                copies the question into its area as the answered one
    supervisor  reads the document

Only one profile is made at a time. Until this profile has arrived or failed, the supervisor refuses further questions. A worker that is not
asked does nothing. A question is one word, so that no process reads half of it. It holds the time of the question, the worker, and the
seconds.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from shm.areas import SUPERVISOR_AREA, Area, Areas
from shm.documents import DocumentReader, DocumentSchema, DocumentWriter

ASKED: Final = "profile_asked"
ANSWERED: Final = "profile_answered"
SCALARS: Final = (ASKED, ANSWERED)
# The limit of a compressed profile. A longer profile loses the stacks with the fewest samples.
DOCUMENT_BYTES: Final = 32 << 10
SECONDS_MAX: Final = 60
HERTZ: Final = 100  # samples per second of CPU time, as in Go's profiles
LATE_S: Final = 2.0  # a worker ignores an older question, because the supervisor has given it up
GRACE_S: Final = 5.0  # the time that a worker has to begin and to publish, besides the profile's seconds
_SECONDS_BITS: Final = 8
_WORKER_BITS: Final = 12


class Function(NamedTuple):
    """One Python function: `module.qualified name`, its file, and its first line."""

    name: str
    file: str
    line: int


class Profile(msgspec.Struct, frozen=True):
    """The samples of one worker.

    `stacks`: pairs of a stack and its number of samples. A stack has indices into `functions`, with the outermost function first.
    `left_out`: the number of samples whose stacks did not fit into the document.
    """

    worker: int
    seconds: int
    functions: list[Function]
    stacks: list[tuple[list[int], int]]
    left_out: int = 0


class Question(NamedTuple):
    """A question for a profile. `asked_ms`: milliseconds of the monotonic clock, which all processes share.

    `worker`: the number of the worker, from 0.
    """

    asked_ms: int
    worker: int
    seconds: int

    @property
    def word(self) -> int:
        return (self.asked_ms << _WORKER_BITS | self.worker) << _SECONDS_BITS | self.seconds

    @classmethod
    def of(cls, word: int) -> "Question":
        """Decodes a question from its word."""
        rest, seconds = divmod(word, 1 << _SECONDS_BITS)
        return cls(rest >> _WORKER_BITS, rest & (1 << _WORKER_BITS) - 1, seconds)


class Busy(Exception):
    """Raised while another profile is under way. `seconds`: the longest time that this profile may still take."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"a profile is under way, for {seconds:.0f} s at most")
        self.seconds = seconds


class NotServing(Exception):
    """Raised for a worker that does not serve. The text names the workers that serve."""


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Profile)


def schema(workers: int) -> DocumentSchema:
    """Returns the schema of the documents: one document per worker."""
    return DocumentSchema((DOCUMENT_BYTES,) * workers)


def packed(profile: Profile) -> bytes:
    """Encodes a profile as a document. While the profile is too long, drops the half of its stacks that has the fewest samples."""
    while len(data := zlib.compress(_encoder.encode(profile))) > DOCUMENT_BYTES:
        often_first = sorted(profile.stacks, key=lambda stack: -stack[1])
        kept, dropped = often_first[: len(often_first) // 2], often_first[len(often_first) // 2 :]
        numbers = {number: place for place, number in enumerate(sorted({n for stack, _ in kept for n in stack}))}
        profile = Profile(
            profile.worker,
            profile.seconds,
            [profile.functions[number] for number in numbers],
            [([numbers[number] for number in stack], count) for stack, count in kept],
            profile.left_out + sum(count for _, count in dropped),
        )
    return data


def unpacked(data: bytes) -> Profile:
    """Decodes the profile in a document."""
    return _decoder.decode(zlib.decompress(data))


@dataclass(slots=True)
class ProfileAsking:
    """The supervisor's side: asks one worker for a profile and reads the answer."""

    area: Area
    areas: Areas
    documents: DocumentReader
    wake: Callable[[int], None]
    now: Callable[[], float]
    until: float = 0.0  # the time at which the present profile is given up; 0 without one

    def serving(self) -> list[int]:
        """Returns the numbers of the workers that can be asked."""
        return [area - 1 for area in self.areas.serving_workers()]

    def ask(self, worker: int, seconds: int) -> Question:
        """Asks a worker for a profile of `seconds` seconds. Raises Busy or NotServing."""
        now = self.now()
        if now < self.until:
            raise Busy(self.until - now)
        if worker not in (serving := self.serving()):
            raise NotServing(f"worker {worker} does not serve; these do: {', '.join(map(str, serving)) or 'none'}")
        question = Question(int(now * 1000), worker, seconds)
        self.area.scalars[self.area.schema.scalar[ASKED]] = question.word
        self.until = now + seconds + GRACE_S
        self.wake(worker)
        return question

    def answer(self, question: Question) -> Profile | None:
        """Returns the profile if it has arrived, else None. Raises TimeoutError if the profile is overdue."""
        if self.areas.scalars(ANSWERED)[1 + question.worker] == question.word:
            document = self.documents.read(question.worker)
            if document is not None:
                self.until = 0.0
                return unpacked(document[1])
        if self.now() >= question.asked_ms / 1000 + question.seconds + GRACE_S:
            raise TimeoutError(f"worker {question.worker} has not answered; it may have ended meanwhile")
        return None


@dataclass(slots=True)
class ProfileAnswering:
    """A worker's side: finds out whether the supervisor has asked this worker, and publishes the answer."""

    areas: Areas
    area: Area
    documents: DocumentWriter
    index: int
    now: Callable[[], float]

    def question(self) -> Question | None:
        """Returns the question that this worker must answer, or None without a question."""
        word = self.areas.scalars(ASKED)[SUPERVISOR_AREA]
        question = Question.of(word)
        if (
            question.worker != self.index
            or word == self.area.scalars[self.area.schema.scalar[ANSWERED]]
            or self.now() - question.asked_ms / 1000 > LATE_S
        ):
            return None
        return question

    def publish(self, question: Question, profile: Profile) -> None:
        """Publishes the answer to the question."""
        self.documents.write(self.index, packed(profile))
        self.area.scalars[self.area.schema.scalar[ANSWERED]] = question.word
