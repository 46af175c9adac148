"""Tokens of one request's prompts, and the media among them: typed data between the token producer and its readers.

`Parts` go the other way: what a parser found in the body, for who tokenises. They are read out of the body only when somebody
asks (`Prompt.parts`), so that configurations without a token producer pay nothing for them.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from epp.data import Datum
from epp.request import EMPTY_PROMPT, Feature, Media, Parts, Request

__all__ = (
    "TOKENS",
    "TOKEN_PRODUCER",
    "Feature",
    "Media",
    "Parts",
    "PromptTokens",
    "TokenizedPrompt",
    "let_go",
    "token_count",
)

TOKEN_PRODUCER = "token-producer"

TokenIds: TypeAlias = NDArray[np.uint32]


class PromptTokens:
    """One prompt. `token_ids` is None where only its media are known; `features` are in the prompt's order."""

    __slots__ = ("features", "token_ids")

    def __init__(self, token_ids: TokenIds | None, features: Sequence[Feature] = ()) -> None:
        self.token_ids = token_ids
        self.features = features


class TokenizedPrompt:
    """All prompts of a request: a completion may have several, everything else has one."""

    __slots__ = ("cache_salt", "prompts")

    def __init__(self, prompts: Sequence[PromptTokens], cache_salt: str = "") -> None:
        self.prompts = prompts
        self.cache_salt = cache_salt

    @property
    def count(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts if prompt.token_ids is not None)


# The same whatever name the producer's instance has. Gone when the request is decided.
TOKENS = Datum(f"tokenized_prompt/{TOKEN_PRODUCER}", TokenizedPrompt)
_NAME = TOKENS.name


def token_count(request: Request) -> int:
    """Prompt tokens: the token producer's count where there is one, else the estimate by bytes."""
    tokenized = request[TOKENS]
    return request.prompt.tokens if tokenized is None else tokenized.count


def let_go(request: Request) -> None:
    """It is decided: what may be as long as the body, and is there for the decision alone, is not kept for the answer."""
    request.prompt = EMPTY_PROMPT
    request.cache_salt = ""
    request.data.pop(_NAME, None)
