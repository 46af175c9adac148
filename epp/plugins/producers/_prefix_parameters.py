"""The parameters of `approx-prefix-cache-producer`. Not compiled: msgspec reads annotations at run time."""

from typing import Annotated, Final

import msgspec

BLOCK_TOKENS_MAX: Final = 1 << 20  # with larger blocks, no prompt would have a whole block
BLOCK_TOKENS_DEFAULT: Final = 16  # the reference picker's default; means BLOCK_TOKENS_MIN here
LRU_CAPACITY: Final = 31250


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How prompts are cut into blocks, and how many blocks are kept. A limit of 0 means no limit, which is the default.

    Names and defaults are those of the reference picker, but blocks have at least 64 tokens.

    auto_tune: Keep as many blocks of a server as its own metrics say it can cache; without such metrics, `lru_capacity_per_server`.
    block_size_tokens: Tokens that are hashed as a unit.
    block_size: Deprecated: use `block_size_tokens`.
    max_prefix_tokens_to_match: How much of a prompt is matched, in tokens, at least one block. Overrides `max_prefix_blocks_to_match`.
    max_prefix_blocks_to_match: How much of a prompt is matched, in blocks.
    lru_capacity_per_server: How many blocks a server is assumed to hold.
    """

    auto_tune: bool = True
    block_size_tokens: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_TOKENS_MAX)] = BLOCK_TOKENS_DEFAULT
    block_size: Annotated[int, msgspec.Meta(ge=0, le=BLOCK_TOKENS_MAX)] = 0
    max_prefix_tokens_to_match: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_prefix_blocks_to_match: Annotated[int, msgspec.Meta(ge=0)] = 0
    lru_capacity_per_server: Annotated[int, msgspec.Meta(ge=1)] = LRU_CAPACITY
