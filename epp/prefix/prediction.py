"""What a decision predicted: how many prompt tokens the picked endpoint holds in its prefix cache already.

A prefix producer says it for every endpoint at decision time (`PrefixMatch`); what the model server reports when it has answered
stands beside it (REPORTED), so that both can be explained and compared. Where several producers match, the one that scorers
read is compared.

The picker takes 4 bytes for a token where no token producer counts them, and servers do not: so the share of the prompt is what is
held against their figures, in tokens as they count them (`as_reported`).

No prediction where another server computes the prompt: who decodes then reports as cached what was sent to it.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from epp.data import Datum
from epp.decision import Decision, Usage
from epp.plugin import Plugin
from epp.prefix.match import PrefixMatch

REPORTED: Final = Datum("prefix_reported", Usage)  # the runtime sets it when the answer has ended


def compared_match(producers: Sequence[Plugin], scorers: Iterable[Plugin]) -> Datum[PrefixMatch] | None:
    """Whose match is held against what is reported; None: no producer of this configuration matches prefixes."""
    produced = [key for p in producers for key in p.produces if isinstance(key, Datum) and key.type is PrefixMatch]
    read = {key for scorer in scorers for key in scorer.consumes}
    return next((key for key in produced if key in read), produced[0] if produced else None)


def predicted_tokens(match: PrefixMatch, decision: Decision) -> int | None:
    """At the first target, in the picker's own count of tokens; None: there is no prediction for it."""
    runs = decision.runs
    run = runs.get(decision.primary)
    if run is None or (len(runs) > 1 and decision.prefill != decision.primary and runs.get(decision.prefill)):
        return None
    blocks = match.blocks
    if blocks is None:
        return 0
    picked, rows = run.picked[0], run.candidates.rows
    return int(blocks.item(picked if rows is None else rows[picked])) * match.block_tokens


def as_reported(predicted: int, match: PrefixMatch, prompt: int) -> int:
    """The same prediction in the model server's tokens, of which the prompt has `prompt`: no more than those."""
    return predicted * prompt // match.tokens if predicted < match.tokens else prompt
