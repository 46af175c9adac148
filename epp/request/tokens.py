"""Defines tokens and media of one request's prompts: typed data that producers pass to readers.

    parser ── Parts: texts, media, token ids ──▶ token producer ── TOKENS ──▶ readers

`Parts` are read from the body only when `Prompt.parts` is called, so configurations without a token producer pay nothing for them.
"""

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from epp.candidates import Floats
from epp.data import Datum
from epp.request import EMPTY_PROMPT, Feature, Media, Parts, Request

__all__ = (
    "NO_TOKENS",
    "TOKENS",
    "TOKEN_PRODUCER",
    "Feature",
    "Media",
    "Parts",
    "PromptTokens",
    "TokenizedPrompt",
    "drop_prompt",
    "token_count",
)

TOKEN_PRODUCER: Final = "token-producer"

TokenIds: TypeAlias = NDArray[np.uint32]


class PromptTokens:
    """Holds one tokenized prompt.

    `token_ids`: uint32; None if only the media are known. `features`: the media items, in the prompt's order.
    """

    __slots__ = ("features", "token_ids")

    def __init__(self, token_ids: TokenIds | None, features: Sequence[Feature] = ()) -> None:
        self.token_ids = token_ids
        self.features = features


class TokenizedPrompt:
    """Holds all prompts of a request, tokenized. A completion may have several prompts, other requests have one."""

    __slots__ = ("cache_salt", "prompts")

    def __init__(self, prompts: Sequence[PromptTokens], cache_salt: str = "") -> None:
        self.prompts = prompts
        self.cache_salt = cache_salt

    @property
    def count(self) -> int:
        """Returns the number of tokens in all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts if prompt.token_ids is not None)


# All producers emit under this one key, whatever the name of their instance. The value exists until the request is decided.
TOKENS: Final = Datum(f"tokenized_prompt/{TOKEN_PRODUCER}", TokenizedPrompt)
# Why the token producer has no tokens of this request: one of few texts.
NO_TOKENS: Final = Datum(f"no_tokens/{TOKEN_PRODUCER}", str, "")
_NAME: Final = TOKENS.name


def no_tokens(reason: str) -> str:
    """Says that a request has no tokens, with the reason that NO_TOKENS has; "" without a reason."""
    return f"no tokens ({reason})" if reason else "no tokens"


def token_count(request: Request) -> int:
    """Returns the number of prompt tokens: counted if there is a token producer, otherwise estimated from the bytes."""
    tokenized = request[TOKENS]
    return request.prompt.tokens if tokenized is None else tokenized.count


def drop_prompt(request: Request) -> None:
    """Drops the data of a decided request that are needed only for the decision and may be as large as the request's body."""
    request.prompt = EMPTY_PROMPT
    request.cache_salt = ""
    request.data.pop(_NAME, None)


MEDIA_PRODUCER = "mm-embeddings-cache-producer"


class MediaMatch:
    """Says how many of the request's media items each endpoint has cached. Every item has equal weight.

    `total`: number of distinct media items in the request. `held`: how many of these each endpoint has cached, float64 of the snapshot's
    shape (endpoints,); None if no endpoint has any, for example for a request without media.
    """

    __slots__ = ("held", "total")

    def __init__(self, held: Floats | None, total: int) -> None:
        self.held = held
        self.total = total


NO_MEDIA = MediaMatch(None, 0)


def media_match(producer: str) -> Datum[MediaMatch]:
    """Returns the key of the match that the named producer emits. An empty name stands for MEDIA_PRODUCER."""
    return Datum(f"media_match/{producer or MEDIA_PRODUCER}", MediaMatch)
