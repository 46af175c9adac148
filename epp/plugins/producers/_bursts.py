"""Places the requests of a burst, so that requests with the same prompt go to the same endpoint.

The rules are those of the reference picker.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Rules(NamedTuple):
    """Sets how to place a burst. `per_replica`: how many requests with one prompt an endpoint gets; -1 for all.

    `shared`: how many leading blocks different prompts must share to go to one endpoint; at 0, only equal prompts do.
    `by_blocks`: whether to balance the blocks that endpoints have to compute, instead of requests.
    """

    per_replica: int
    shared: int
    by_blocks: bool


def assign(chains: Sequence[tuple[int, ...]], running: Mapping[int, float], rules: Rules) -> list[int | None]:
    """Returns the owner id of the endpoint for each request, or None for a request without a preference.

    `chains`: the block hashes of each request. `running`: owner id -> running requests; among equal endpoints, the first one wins.
    """
    placed: list[int | None] = [None] * len(chains)
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for at, chain in enumerate(chains):
        if chain:
            groups[chain].append(at)
    units = [chain for chain, members in groups.items() if len(members) > 1]
    if rules.shared:
        starts = Counter[tuple[int, ...]]()
        for chain, members in groups.items():
            starts[chain[: rules.shared]] += len(members)
        alone = [c for c, members in groups.items() if len(members) == 1 and len(c) >= rules.shared]
        singles = [c for c in alone if starts[c[: rules.shared]] > 1]
    else:
        singles = []
    units = sorted(units, key=len, reverse=True) + sorted(singles, key=len, reverse=True)
    if not units or not running:
        return placed
    total = sum(len(c) if rules.by_blocks else len(groups[c]) for c in units)
    table = _Table(running, -(-total // len(running)), rules)
    for chain in units:
        for at, owner in zip(groups[chain], table.place(chain, len(groups[chain])), strict=True):
            placed[at] = owner
    return placed


class _Table:
    """Counts the requests or blocks of this burst that each endpoint got. `fair`: with this load, an endpoint attracts no similar prompts
    any more.
    """

    def __init__(self, running: Mapping[int, float], fair: int, rules: Rules) -> None:
        self._running = running
        self._fair = fair
        self._rules = rules
        self._load = Counter[int]()
        self._holders: dict[int, set[int]] = defaultdict(set)  # block -> owners

    def place(self, chain: tuple[int, ...], count: int) -> list[int]:
        """Returns the owners of `count` requests with this chain."""
        matches = self._matches(chain)
        here = Counter[int]()  # requests with this chain per owner
        owners: list[int] = []
        while len(owners) < count:
            owner = self._choice(matches if not owners and self._rules.shared else None, here)
            run = count - len(owners)
            if self._rules.per_replica > 0:
                run = min(run, max(1, self._rules.per_replica - here[owner]))
            if not self._rules.by_blocks:
                self._load[owner] += run
            elif not here[owner]:
                self._load[owner] += max(0, len(chain) - matches[owner])
            here[owner] += run
            owners += [owner] * run
        for block in chain:
            self._holders[block].update(here)
        return owners

    def _matches(self, chain: tuple[int, ...]) -> Counter[int]:
        matches = Counter[int]()
        for block in chain:
            holders = self._holders.get(block)
            if not holders:
                break
            matches.update(holders)
        return matches

    def _choice(self, matches: Counter[int] | None, here: Counter[int]) -> int:
        """Returns the owner for the next request: the least loaded owner with room.

        With `matches`, an owner with a long enough match and less than its fair share goes first; the longest match wins.
        """
        limit = self._rules.per_replica
        room = [owner for owner in self._running if limit < 0 or here[owner] < limit]
        if matches is not None:
            near = [o for o in room if self._load[o] < self._fair and matches[o] >= self._rules.shared]
            if near:
                return min(near, key=lambda owner: (-matches[owner], self._load[owner], self._running[owner]))
        return min(room or self._running, key=lambda owner: (self._load[owner], self._running[owner]))
