"""Finds what prompts have in common: which request continues which conversation, and what servers cache beyond the blocks of earlier
prompts.

A request continues a conversation if its prompt begins with the whole prompt of an earlier request, if the earlier prompt had a block of
its own, and if there is room for the earlier answer. So several questions about one document are not taken as a conversation.

Block hashes show only in whole blocks of the picker what two prompts share. A server caches smaller blocks, and may keep its answer, with
which the next turn begins. How much that is follows from the server's report, if the server held all blocks that any earlier prompt had.
Otherwise, the median of the other requests is used.

If a server was predicted to hold blocks that no request of the recording had sent there before, the server held these blocks when the
recording began.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

from loadtest.replay.reading import Asked
from loadtest.replay.runs import HASH_BYTES, Run, Runs

OPEN: Final = -1
ANSWER_SHARE: Final = 0.5  # a next turn is longer by at least this share of the answer's tokens, which are estimates


class Prompts(NamedTuple):
    """For each request: the index of the turn before in its conversation, or OPEN; how many leading blocks of its prompt an earlier prompt
    had; how many further tokens a server with these blocks has cached; and the runs of the prompt.
    """

    before: list[int]
    known: list[int]
    beyond: list[int]
    runs: list[tuple[Run, ...]]


class Warm(NamedTuple):
    """An endpoint that held the first `blocks` blocks of the prompt of request `number` before the recording began."""

    number: int
    endpoint: int
    blocks: int


def compared(requests: Sequence[Asked], warm: Sequence[Warm] = ()) -> Prompts:
    """Compares each prompt with the earlier ones. `requests`: in the order of arrival. `warm`: runs also end where these end."""
    before = [OPEN] * len(requests)
    known = [0] * len(requests)
    last: dict[bytes, int] = {}  # the last whole block of a prompt -> the last request with this prompt
    runs = Runs()
    for index, asked in enumerate(requests):
        blocks = asked.whole_blocks()
        ends = runs.add(blocks)
        size = len(blocks) // HASH_BYTES
        known[index] = min(max([ends[-1], *(held for _, held in asked.held)]), size)
        for end in reversed(ends[1:]):
            block = blocks[(end - 1) * HASH_BYTES : end * HASH_BYTES]
            found = last.get(block)
            if found is not None and _continues(requests[found], asked):
                before[index] = found
                del last[block]  # a turn has at most one next turn
                break
        if ends[-1] < size:
            last[blocks[-HASH_BYTES:]] = index
    for number, _, count in warm:
        runs.add(requests[number].whole_blocks()[: count * HASH_BYTES])
    return Prompts(before, known, _beyond(requests, known), [runs.of(asked.whole_blocks()) for asked in requests])


def warm(requests: Sequence[Asked]) -> list[Warm]:
    """Returns what endpoints held before the first request, in the order in which the requests show it."""
    found = []
    held: dict[int, Runs] = {}  # by endpoint
    decided = [asked.at + asked.waited_s for asked in requests]
    until = max((at for at, asked in zip(decided, requests, strict=True) if asked.held), default=-math.inf)
    for number in sorted((number for number, at in enumerate(decided) if at <= until), key=decided.__getitem__):
        asked = requests[number]
        blocks = asked.whole_blocks()
        for endpoint, count in asked.held:
            first = blocks[: count * HASH_BYTES]
            if held.setdefault(endpoint, Runs()).add(first)[-1] * HASH_BYTES < len(first):
                found.append(Warm(number, endpoint, count))
        held.setdefault(asked.target, Runs()).add(blocks)
    return found


def _continues(earlier: Asked, later: Asked) -> bool:
    if math.isnan(earlier.lasted_s) or earlier.at + earlier.lasted_s > later.at:
        return False
    return later.prompt >= earlier.prompt + ANSWER_SHARE * (earlier.output or 0)


def _beyond(requests: Sequence[Asked], known: Sequence[int]) -> list[int]:
    found: list[int | None] = []
    for asked, blocks in zip(requests, known, strict=True):
        size = asked.server_block_tokens
        more = None if asked.cached is None or not blocks else asked.cached - int(blocks * size)
        found.append(more if more is not None and more > -size else None)
    usual = int(statistics.median([more for more in found if more is not None] or [0]))
    return [(usual if blocks else 0) if more is None else more for more, blocks in zip(found, known, strict=True)]
