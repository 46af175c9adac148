"""Bounds the tokens that a model server reports by the most that the request can have cost. A server may report anything.

    completion  at most the bytes of the answer: every token of an answer is at least one byte of its text. Tokenizers based on bytes have
                no other tokens (GPT-2, Radford et al. 2019, section 2.2; SentencePiece with byte fallback), and tokens that leave no text,
                such as the end of the text, are fewer than the bytes of the JSON around it
                at most max_tokens for each choice of each prompt
    prompt      at most the bytes of the body, plus TEMPLATE_TOKENS for what the server's chat template adds to each prompt, plus what the
                body only refers to (`Extent.unseen_tokens`); some engines count it once for each choice
    cached      at most the prompt

The bytes do not bound an answer that lacks a part of the generated text (`Extent.hidden`): if the client also sets no max_tokens, the
bound is the duration of the answer times TOKENS_PER_S for each choice.

All readers of usage (fairness, learned lengths and latencies, counters of tokens, recordings) get the bounded usage.
"""

from typing import Final

from epp.decision.decision import Usage
from epp.request import USUAL, Request

TEMPLATE_TOKENS: Final = 1024
TOKENS_PER_S: Final = 2000  # no engine generates a single sequence faster
IMPLAUSIBLE: Final = 2  # the log names a server that reports more than this many times the bound; less may be rounding or a template


def bounded(usage: Usage, request: Request, answer_bytes: int, seconds: float) -> Usage:
    """Returns the usage with each figure lowered to its bound; the same object if no figure is above its bound.

    `answer_bytes`: the size of the answer's body. `seconds`: from the request to the end of its answer.
    """
    prompt, completion, cached = usage.prompt, usage.completion, usage.cached
    extent = request.extent or USUAL
    if prompt is not None:
        most = request.body_bytes + TEMPLATE_TOKENS * extent.prompts + extent.unseen_tokens
        prompt = min(max(0, prompt), most * extent.choices)
    if completion is not None:
        completion = min(max(0, completion), _completion_max(request, answer_bytes, seconds))
    if cached is not None:
        cached = max(0, cached if prompt is None else min(cached, prompt))
    if prompt == usage.prompt and completion == usage.completion and cached == usage.cached:
        return usage
    return Usage(prompt, completion, cached)


def implausible(reported: Usage, within: Usage) -> bool:
    """Returns whether a report is far above its bounds. `within`: the report after it was bounded."""
    return _far(reported.prompt, within.prompt) or _far(reported.completion, within.completion)


def _completion_max(request: Request, answer_bytes: int, seconds: float) -> int:
    extent = request.extent or USUAL
    sequences = extent.choices * extent.prompts
    limit = request.max_tokens
    most = None if limit is None else max(1, limit) * sequences
    if not extent.hidden:
        return answer_bytes if most is None else min(most, answer_bytes)
    return max(answer_bytes, int(seconds * TOKENS_PER_S) * sequences) if most is None else most


def _far(reported: int | None, within: int | None) -> bool:
    return reported is not None and within is not None and reported > IMPLAUSIBLE * within
