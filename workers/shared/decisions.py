"""Keeps the last decisions of each worker. The worker explains these decisions when the supervisor asks.

    worker      keeps references in a deque per pool of (time, request, decision or refusal): 0.2 us per decision, without any computation
    supervisor  increments ASKED in its area and wakes each worker through its eventfd
    worker      explains one decision per turn of its event loop, publishes all as its document, and then sets ANSWERED in its area
    supervisor  reads the documents of all workers that answered, newest first

A worker keeps KEPT decisions of each pool, and KEPT_MAX of all pools. If there are more, the pools with the most decisions lose their
oldest, so that a busy pool displaces no decision of a quiet pool. Its document is limited to DOCUMENT_BYTES. The document begins with the
newest decision of each pool, then has the second newest of each pool, and so on. So the oldest decisions of busy pools may be missing. A
worker that is killed loses its decisions, but the document that it published last stays until its successor answers.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from epp.decision.decision import Decision
from epp.decision.explain import Explanation, explain
from epp.decision.pipeline import Pipeline
from epp.errors import Refused
from epp.request import Request
from epp.request.tokens import drop_prompt
from shm.areas import SUPERVISOR_AREA, Area, Areas
from shm.documents import DocumentReader, DocumentSchema, DocumentWriter

if TYPE_CHECKING:
    import asyncio

KEPT: Final = 32  # more decisions would displace the requests' data from the CPU's caches
KEPT_MAX: Final = 128
KEPT_ROOM: Final = 96  # too many decisions shrink to this number: low, because this takes time
DOCUMENT_BYTES: Final = 128 << 10
ASKED: Final = "explain_asked"
ANSWERED: Final = "explain_answered"
SCALARS: Final = (ASKED, ANSWERED)

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_explanation: Final = msgspec.msgpack.Decoder(Explanation)


def schema(workers: int) -> DocumentSchema:
    """Returns the schema of the documents: one document per worker."""
    return DocumentSchema((DOCUMENT_BYTES,) * workers)


class Used(Protocol):
    """The pipeline that made a decision, the names of its disabled plugins, and the name of its pool: "" if the picker has one pool."""

    @property
    def pipeline(self) -> Pipeline: ...
    @property
    def left_out(self) -> Sequence[str]: ...
    @property
    def pool(self) -> str: ...


Entry = tuple[float, Request, Decision | None, Refused | None, Used]


class Recent:
    """Keeps a worker's last decisions. `log`: gets the explanation of each decision at once, if given."""

    def __init__(self, worker: int, now: Callable[[], float], log: Callable[[Explanation], None] | None = None) -> None:
        self._pools: dict[str, deque[Entry]] = {}
        self._count = 0
        self._worker = worker
        self._now = now
        self._log = log

    def add(self, now: float, request: Request, decision: Decision | None, refused: Refused | None = None, *, used: Used) -> None:
        """Records that a request was decided or refused. `now`: monotonic seconds. `used`: the pipeline that made the decision."""
        if refused is not None:  # drop the traceback, too, because its frames hold the body
            drop_prompt(request)
            refused = Refused(refused.cause, refused.detail)
        entry = (now, request, decision, refused, used)
        if (kept := self._pools.get(used.pool)) is None:
            kept = self._pools[used.pool] = deque(maxlen=KEPT)
        self._count -= len(kept)
        kept.append(entry)
        self._count += len(kept)
        if self._count > KEPT_MAX:
            self._shorten()
        if self._log is not None:
            self._log(self._explained(entry))

    def explained(self) -> Iterator[Explanation]:
        """Yields the explanations of all kept decisions: the newest of each pool, then the second newest of each pool, and so on."""
        for of_rank in zip_longest(*(tuple(reversed(kept)) for kept in self._pools.values())):
            for entry in of_rank:
                if entry is not None:
                    yield self._explained(entry)

    @property
    def kept(self) -> list[Entry]:
        """The kept decisions of all pools, oldest first."""
        return sorted((entry for kept in self._pools.values() for entry in kept), key=itemgetter(0))

    def _shorten(self) -> None:
        """Drops decisions until KEPT_ROOM are left: the oldest of the pools with the most, or all of the pools that decided first."""
        lengths = sorted(map(len, self._pools.values()), reverse=True)
        most = lengths[0]
        while most > 1 and sum(min(length, most) for length in lengths) > KEPT_ROOM:
            most -= 1
        for kept in self._pools.values():
            while len(kept) > most:
                kept.popleft()
        for pool in sorted(self._pools, key=lambda pool: self._pools[pool][-1][0])[: max(0, len(self._pools) - KEPT_ROOM)]:
            del self._pools[pool]
        self._count = sum(map(len, self._pools.values()))

    def _explained(self, entry: Entry) -> Explanation:
        at, request, decision, refused, used = entry
        ago_s, left_out = self._now() - at, used.left_out
        found = explain(used.pipeline, request, decision, refused, ago_s=ago_s, worker=self._worker, left_out=left_out)
        return msgspec.structs.replace(found, pool=used.pool) if used.pool else found


class Publisher:
    """The worker's side: publishes explanations when the supervisor asks for them."""

    def __init__(self, recent: Recent, areas: Areas, area: Area, documents: DocumentWriter, index: int) -> None:
        self._recent = recent
        self._areas = areas
        self._area = area
        self._documents = documents
        self._index = index
        self._answered = area.schema.scalar[ANSWERED]
        self._answering: Iterator[Explanation] | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._asked = 0

    def woken(self, loop: "asyncio.AbstractEventLoop") -> None:
        """Starts an answer if the supervisor has asked. Call this after each wake-up."""
        asked = self._areas.scalars(ASKED)[SUPERVISOR_AREA]
        if asked == self._area.scalars[self._answered] or self._answering is not None:
            return
        self._asked = asked
        self._parts, self._size = [], 0
        self._answering = self._recent.explained()
        loop.call_soon(self._step, loop)

    def _step(self, loop: "asyncio.AbstractEventLoop") -> None:
        """Explains one decision, then lets the event loop turn, because in a large pool one explanation takes a millisecond."""
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
        self._area.scalars[self._answered] = self._asked
        self.woken(loop)  # the supervisor may have asked again meanwhile


class DecisionsAsking:
    """The supervisor's side: asks all workers for explanations and reads their answers."""

    def __init__(self, area: Area, areas: Areas, documents: DocumentReader, wake: Callable[[int], None], now: Callable[[], float]) -> None:
        self._area = area
        self._areas = areas
        self._documents = documents
        self._wake = wake
        self._now = now
        self._asked = area.schema.scalar[ASKED]

    def ask(self) -> int:
        """Asks all workers. Returns the number of the question."""
        # The number comes from the clock, so that it is above all numbers of a predecessor.
        number = max(self._area.scalars[self._asked] + 1, int(self._now() * 1000))
        self._area.scalars[self._asked] = number
        for area in self._areas.serving_workers():
            self._wake(area - 1)
        return number

    def answered(self, number: int) -> bool:
        """Whether every serving worker has answered question `number`."""
        answers = self._areas.scalars(ANSWERED)
        return all(answers[area] >= number for area in self._areas.serving_workers())

    def read(self) -> list[Explanation]:
        """Returns the explanations that the workers have published, newest first."""
        explanations = []
        for index in range(self._areas.schema.areas - 1):
            document = self._documents.read(index)
            if document is not None and document[1]:
                explanations += [_explanation.decode(part) for part in _decoder.decode(document[1])]
        return sorted(explanations, key=lambda explanation: explanation.ago_s)


def by_request(explanations: Sequence[Explanation], request_id: str) -> Explanation | None:
    """Returns the newest explanation with this request id, or None. `explanations`: newest first."""
    return next((explanation for explanation in explanations if explanation.request_id == request_id), None)
