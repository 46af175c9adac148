"""What a prefix producer found out about one request: typed data between producer, scorers and deciders."""

from epp.candidates import Floats
from epp.data import Datum
from epp.prefix.blocks import Hashes

APPROXIMATE = "approx-prefix-cache-producer"


class CutsPrompts:
    """A producer that cuts prompts into blocks for the shared index, whose blocks have one size."""

    block_tokens: int


class PrefixMatch:
    """`blocks`: leading blocks held per endpoint, float64 of the snapshot's shape; `total` blocks of `block_tokens` in the prompt.

    `tokens`: of the prompt, by the picker's count; as many as the blocks have where nobody says. It outlives the prompt's text.
    """

    __slots__ = ("block_tokens", "blocks", "hashes", "tokens", "total")

    def __init__(self, blocks: Floats | None, hashes: Hashes, block_tokens: int, tokens: int = 0) -> None:
        self.blocks = blocks  # None: no endpoint holds any
        self.hashes = hashes
        self.total = len(hashes)
        self.block_tokens = block_tokens
        self.tokens = tokens or self.total * block_tokens


def prefix_match(producer: str) -> Datum[PrefixMatch]:
    """The key under which the producer of that name emits its match."""
    return Datum(f"prefix_match/{producer}", PrefixMatch)
