"""Keeps a worker's copy of the model-rewrite rules up to date.

    supervisor   Objects ─ compiled ─▶ Rules ─▶ document REWRITES
    worker       document ─ RewritesView ─▶ `Intake`: the model to request instead

Each request checks for a later version of the document, so it finds all rules that were published before it. Each decision of a rule is
counted under the names of the InferenceModelRewrite, the requested model and the chosen model. The names in rules come from operators, not
from clients. So they always keep their metric labels, even if clients request very many models.

`epp.request.model_rewrite` chooses the rule, `epp.request.renaming` renames the model.
"""

from collections.abc import Callable

import msgspec

from compiled.classes import subclassed
from epp.metrics.label_caps import LabelCaps
from epp.metrics.request_series import MODEL_REWRITE_DECISIONS
from epp.request.model_rewrite import Rules
from shm.documents import DocumentReader, DocumentView
from shm.series import SeriesWriter
from workers.shared.documents import rewrites_of

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Rules).decode

Rewriting = Callable[[str], str | None]


@subclassed
class RewritesView(DocumentView[Rules]):
    """Reads the rewrite rules in a worker."""

    def __init__(
        self, reader: DocumentReader, decisions: SeriesWriter, caps: LabelCaps, random: Callable[[], float], pool: int | None = None
    ) -> None:
        """`random` returns a number from [0, 1). `pool`: as for `ObjectivesView`."""
        super().__init__(reader, rewrites_of(pool), decode, Rules())
        self._rewriting: Rewriting | None = None
        self._decisions = decisions
        self._decided = decisions.counter_at[MODEL_REWRITE_DECISIONS.name]
        self._caps = caps
        self._random = random

    def present(self) -> Rewriting | None:
        """Returns the present rules as a function, or None without rules. Called for each request."""
        self.look_once()
        return self._rewriting

    def look(self) -> bool:
        """Reads the document if it has changed. Returns whether it has changed."""
        if not super().look():
            return False
        self._caps.pin(self.content.names())
        self._rewriting = self._target if self.content.choices else None
        return True

    def _target(self, model: str) -> str | None:
        """Returns the model to request instead of `model`, or None if no rule matches."""
        choice = self.content.choice(model)
        if choice is None:
            return None
        target = choice.pick(self._random)
        decisions = self._decisions
        decisions.words[decisions.block((choice.rewrite, model, target)) + self._decided] += 1
        return target
