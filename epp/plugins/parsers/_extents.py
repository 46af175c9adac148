"""Finds out what a request may cost beyond one answer to one text prompt (`Extent`): choices, prompts, media and stored content."""

from collections.abc import Sequence
from typing import Any, Final

from epp.plugins.parsers._canonical import BRACKET, first
from epp.plugins.parsers._structs import EMPTY, Message, Raw
from epp.request import Extent, Request

# A text that comes with each medium in a body, or with its URL. Each such text may mean MEDIUM_TOKENS: vLLM and SGLang make at most 16,384
# tokens of an image for usual models, and a video has two or three of these texts.
MEDIUM: Final = b'url"'
MEDIUM_TOKENS: Final = 16_384
STORED: Final = b'file_id"'  # a text that comes with each document that the server stores
# Content above this size is not searched for media: its bytes alone allow as many tokens as a few media have.
SEARCHED_BYTES: Final = 16_384
CONTEXT_TOKENS: Final = 1 << 20  # tokens of stored content: the longest context of usual models
CHOICES_MAX: Final = 1024  # engines allow fewer


def choices_of(number: Any, best_of: Any = None) -> int:
    """Returns how many choices a request asks for, from 1 to CHOICES_MAX. The parameters are values of the body; None if missing."""
    if number is None and best_of is None:
        return 1
    counts = [count for count in (number, best_of) if type(count) is int]
    return min(max([1, *counts]), CHOICES_MAX)


def describe(request: Request, *, choices: int = 1, prompts: int = 1, unseen: int = 0, hidden: bool = False) -> None:
    """Sets the extent of the request, unless it is the usual extent."""
    if choices != 1 or prompts != 1 or unseen or hidden:
        request.extent = Extent(choices, prompts, unseen, hidden)


def prompts_of(raw: Raw, several: int) -> int:
    """Returns the largest number of prompts that a list can have. `several`: how many prompts were read one by one."""
    if several or first(raw) != BRACKET or len(memoryview(raw)) <= SEARCHED_BYTES:
        return max(1, several)
    return bytes(raw).count(b",") + 1


def media_tokens(messages: Sequence[Message]) -> int:
    """Returns the largest number of tokens that the media of these messages can take. A text costs one look."""
    tokens, left = 0, SEARCHED_BYTES
    for message in messages:
        content = message.content
        if content is not EMPTY and first(content) == BRACKET:
            left -= len(memoryview(content))
            if left < 0:
                break
            tokens += _tokens(content)
    return tokens


def item_tokens(raw: Raw) -> int:
    """Does the same as `media_tokens` for a list of items."""
    return _tokens(raw) if first(raw) == BRACKET and len(memoryview(raw)) <= SEARCHED_BYTES else 0


def _tokens(content: Raw) -> int:
    text = bytes(content)
    return text.count(MEDIUM) * MEDIUM_TOKENS + (CONTEXT_TOKENS if STORED in text else 0)
