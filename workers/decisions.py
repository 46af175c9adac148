"""The last decisions of each worker, explained when somebody asks.

    worker      deque of (when, request, decision or refusal): references, 0.2 us a decision, nothing is computed
    supervisor  ASKED in its lane moves, each worker's eventfd wakes it
    worker      explains one decision per turn of its loop, publishes them all as its document, then says ANSWERED in its lane
    supervisor  reads the documents of all workers that answered, newest first

A worker keeps KEPT decisions. What it publishes is bounded by DOCUMENT_BYTES: the oldest are left out. A worker that was killed
takes its decisions with it; what it published last stays until its successor answers.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from epp.decision import Decision
from epp.errors import Refused
from epp.explain import Explanation, explain
from epp.pipeline import Pipeline
from epp.request import Request
from epp.tokens import let_go
from shm.documents import DocumentReader, DocumentSchema, DocumentWriter
from shm.lanes import SUPERVISOR_LANE, Lane, Lanes

KEPT: Final = 32  # more would push what requests need out of the CPU's caches
DOCUMENT_BYTES: Final = 128 << 10
ASKED: Final = "explain_asked"
ANSWERED: Final = "explain_answered"
SCALARS: Final = (ASKED, ANSWERED)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_explanation = msgspec.msgpack.Decoder(Explanation)


def schema(workers: int) -> DocumentSchema:
    """One document per worker."""
    return DocumentSchema((DOCUMENT_BYTES,) * workers)


class Used(NamedTuple):
    """By what decisions are taken: a pipeline, and the plugins that it does without for a while."""

    pipeline: Pipeline
    left_out: Sequence[str] = ()


Entry = tuple[float, Request, Decision | None, Refused | None, Used]


class Recent:
    """A worker's last decisions. `told`, if given, gets each at once, explained: for logs."""

    def __init__(
        self,
        pipeline: Pipeline,
        worker: int,
        now: Callable[[], float],
        told: Callable[[Explanation], None] | None = None,
    ) -> None:
        self.kept: deque[Entry] = deque(maxlen=KEPT)
        self._used = Used(pipeline)
        self._worker = worker
        self._now = now
        self._told = told

    def add(self, now: float, request: Request, decision: Decision | None, refused: Refused | None = None) -> None:
        """A request was decided or refused."""
        if refused is not None:  # the body, which the traceback's frames hold too, is not to live on
            let_go(request)
            refused = Refused(refused.cause, refused.detail)
        entry = (now, request, decision, refused, self._used)
        self.kept.append(entry)
        if self._told is not None:
            self._told(self._explained(entry))

    def use(self, pipeline: Pipeline, left_out: Sequence[str] = ()) -> None:
        """Decisions are taken by this one from now on, without these plugins."""
        self._used = Used(pipeline, left_out)

    def explained(self) -> Iterator[Explanation]:
        """All that is kept, newest first."""
        for entry in reversed(tuple(self.kept)):
            yield self._explained(entry)

    def _explained(self, entry: Entry) -> Explanation:
        at, request, decision, refused, used = entry
        ago_s, left_out = self._now() - at, used.left_out
        return explain(used.pipeline, request, decision, refused, ago_s=ago_s, worker=self._worker, left_out=left_out)


class Publisher:
    """The worker's side: answers when the supervisor has asked."""

    def __init__(self, recent: Recent, lanes: Lanes, lane: Lane, documents: DocumentWriter, index: int) -> None:
        self._recent = recent
        self._lanes = lanes
        self._lane = lane
        self._documents = documents
        self._index = index
        self._answered = lane.schema.scalar[ANSWERED]
        self._answering: Iterator[Explanation] | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._asked = 0

    def woken(self, loop: asyncio.AbstractEventLoop) -> None:
        """Somebody may have asked."""
        asked = self._lanes.scalars(ASKED)[SUPERVISOR_LANE]
        if asked == self._lane.scalars[self._answered] or self._answering is not None:
            return
        self._asked = asked
        self._parts, self._size = [], 0
        self._answering = self._recent.explained()
        loop.call_soon(self._step, loop)

    def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        """One decision, then the loop turns: an explanation of a large pool takes a millisecond."""
        assert self._answering is not None
        explained = next(self._answering, None)
        if explained is not None:
            part = _encoder.encode(explained)
            self._size += len(part)
            if self._size + 16 <= DOCUMENT_BYTES:
                self._parts.append(part)
                loop.call_soon(self._step, loop)
                return
        self._answering = None
        self._documents.write(self._index, _encoder.encode([msgspec.Raw(part) for part in self._parts]))
        self._lane.scalars[self._answered] = self._asked
        self.woken(loop)  # asked again meanwhile


class Asking:
    """The supervisor's side."""

    def __init__(
        self, lane: Lane, lanes: Lanes, documents: DocumentReader, wake: Callable[[int], None], now: Callable[[], float]
    ) -> None:
        self._lane = lane
        self._lanes = lanes
        self._documents = documents
        self._wake = wake
        self._now = now
        self._asked = lane.schema.scalar[ASKED]

    def ask(self) -> int:
        """Ask all workers; the number of the question."""
        # Starts from the clock, so that a successor's question is another than any of its predecessor's.
        number = max(self._lane.scalars[self._asked] + 1, int(self._now() * 1000))
        self._lane.scalars[self._asked] = number
        for index in range(self._lanes.schema.lanes - 1):
            if self._lanes.serving(index + 1):
                self._wake(index)
        return number

    def answered(self, number: int) -> bool:
        """Whether every serving worker has."""
        said = self._lanes.scalars(ANSWERED)
        return all(said[i] >= number for i in range(1, len(said)) if self._lanes.serving(i))

    def read(self) -> list[Explanation]:
        """What the workers published, newest first."""
        found = []
        for index in range(self._lanes.schema.lanes - 1):
            document = self._documents.read(index)
            if document is not None and document[1]:
                found += [_explanation.decode(part) for part in _decoder.decode(document[1])]
        return sorted(found, key=lambda explanation: explanation.ago_s)


def by_request(found: Sequence[Explanation], request_id: str) -> Explanation | None:
    """The newest decision on that request."""
    return next((explanation for explanation in found if explanation.request_id == request_id), None)
