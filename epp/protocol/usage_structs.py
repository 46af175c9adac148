"""Declares the JSON of token usage in answers. This module is not compiled, because msgspec reads annotations at run time.

vLLM reports -1 cached tokens if it did not count them. So a figure that is no count leaves only itself unknown.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec

from epp.errors import UNREADABLE

# uint32, as in the gRPC APIs. Larger numbers are ignored, because their sums would overflow the words in shared memory.
TOKENS_MAX: Final = 2**32 - 1
Tokens = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]


class Details(msgspec.Struct):
    cached_tokens: Tokens | None = None


class UsageObject(msgspec.Struct):
    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    prompt_tokens_details: Details | None = None
    input_tokens_details: Details | None = None


USAGE: Final = msgspec.json.Decoder(UsageObject, strict=False)  # numbers may come as strings


class AnthropicUsage(msgspec.Struct):
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    cache_read_input_tokens: Tokens | None = None
    cache_creation_input_tokens: Tokens | None = None


ANTHROPIC_USAGE: Final = msgspec.json.Decoder(AnthropicUsage, strict=False)


class MetaInfo(msgspec.Struct):
    finish_reason: Any = None
    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    cached_tokens: Tokens | None = None


META_INFO: Final = msgspec.json.Decoder(MetaInfo, strict=False)


def readable_fields(text: bytes, kind: Any) -> Any:
    """Decodes an object that `kind`, one of these structs, cannot hold as a whole. Fields that cannot be read have their defaults.

    Raises one of UNREADABLE.
    """
    members, found = _members.decode(text), kind()
    for name, decode in _fields(kind):
        if (raw := members.get(name)) is not None:
            with contextlib.suppress(*UNREADABLE):
                setattr(found, name, decode(raw))
    return found


@functools.cache
def _fields(kind: Any) -> list[tuple[str, Callable[[msgspec.Raw], Any]]]:
    return [(field.name, msgspec.json.Decoder(field.type, strict=False).decode) for field in msgspec.structs.fields(kind)]


_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
