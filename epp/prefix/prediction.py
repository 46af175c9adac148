"""Defines the prediction of a decision: how many prompt tokens the picked endpoint already holds in its prefix cache.

A prefix producer computes the match of every endpoint at decision time (`PrefixMatch`). With its answer, the model server reports how
many prompt tokens were cached (REPORTED). The picker keeps both to explain and compare them. If several producers match prefixes, the
picker compares the match that a scorer reads.

Without a token producer, the picker assumes 4 bytes per token, which is not what servers count. So the comparison takes the share of the
prompt that the endpoint holds, and converts it to tokens as the server counts them (`PrefixMatch.reported`).

There is no prediction if a prefill server computes the prompt, because the decode server reports all tokens from that server as cached.
The report of a request with several prompts is not compared, because it is about the last prompt alone.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from epp.data import Datum
from epp.decision.decision import Decision, Usage
from epp.plugin import Plugin
from epp.prefix.match import PrefixMatch

REPORTED: Final = Datum("prefix_reported", Usage)  # the runtime sets it when the answer has ended


def compared_match(producers: Sequence[Plugin], scorers: Iterable[Plugin]) -> Datum[PrefixMatch] | None:
    """Returns the key of the match to compare with the reported tokens; None if no producer of this configuration matches prefixes."""
    produced = [key for p in producers for key in p.produces if isinstance(key, Datum) and key.type is PrefixMatch]
    read = {key for scorer in scorers for key in scorer.consumes}
    return next((key for key in produced if key in read), produced[0] if produced else None)


def predicted_row(decision: Decision) -> int:
    """Returns the row of the first target, which has the prediction; -1 without a prediction."""
    runs = decision.runs
    run = runs.get(decision.primary)
    if run is None or (len(runs) > 1 and decision.prefill != decision.primary and runs.get(decision.prefill)):
        return -1
    picked, rows = run.picked[0], run.candidates.rows
    return picked if rows is None else int(rows[picked])


def predicted_tokens(match: PrefixMatch, decision: Decision) -> int | None:
    """Returns the predicted cached tokens at the first target, by the picker's count; None without a prediction."""
    row = predicted_row(decision)
    if row < 0:
        return None
    return 0 if match.cached is None else int(match.cached.item(row))
