"""Model-rewrite rules on their way to requests.

    supervisor   Objects ─ compiled ─▶ Rules ─▶ document REWRITES
    worker       document ─ RewritesView ─▶ `App.rewrite`: the model to ask for instead; None while there are no rules

The worker looks at the document with each of its beats, and a request at nothing: without rules `App.rewrite` is None, as it is
where rules cannot come. A decision by a rule is counted, by the object it is of, the model asked for and the one chosen. Names that
rules have are operators', not clients': they keep their place among the labels of metrics, however many models clients ask for.

What this does not do: rename (`workers.renaming` does), or say which rule counts (`epp.model_rewrite` does).
"""

from collections.abc import Callable

import msgspec

from epp.metrics import MODEL_REWRITE_DECISIONS, LabelCaps
from epp.model_rewrite import Choice, Rules
from shm.documents import DocumentReader
from shm.series import SeriesWriter
from workers.app import App
from workers.documents import REWRITES

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Rules).decode

Rewriting = Callable[[str], str | None]


class RewritesView:
    """The document as a worker sees it; keeps the last good version."""

    def __init__(
        self, reader: DocumentReader, decisions: SeriesWriter, caps: LabelCaps, random: Callable[[], float]
    ) -> None:
        """`random` draws from [0, 1)."""
        self._reader = reader
        self._version = 0
        self._decisions = decisions
        self._decided = decisions.counter_at[MODEL_REWRITE_DECISIONS.name]
        self._caps = caps
        self._random = random
        self._exact: dict[str, Choice] = {}
        self._others: Choice | None = None

    def look(self) -> bool:
        """Whether there is something new."""
        if self._reader.version(REWRITES) == self._version:
            return False
        found = self._reader.read(REWRITES)
        if found is None or found[0] == self._version:
            return False
        self._version, blob = found
        rules = decode(blob)
        self._caps.pin(rules.names())
        self._exact, self._others = rules.by_model(), rules.others()
        return True

    @property
    def rewrite(self) -> Rewriting | None:
        """What `App.rewrite` is from now on."""
        return self._target if self._exact or self._others is not None else None

    def _target(self, model: str) -> str | None:
        """The model to ask for instead of this one; None: no rule is for it."""
        choice = self._exact.get(model, self._others)
        if choice is None:
            return None
        target = choice.pick(self._random)
        decisions = self._decisions
        decisions.words[decisions.block((choice.rewrite, model, target)) + self._decided] += 1
        return target


def follow(app: App, rewrites: RewritesView) -> None:
    """What requests of this app are rewritten by is what the document says now."""
    if rewrites.look():
        app.rewrite = rewrites.rewrite
