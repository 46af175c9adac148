"""Measures in one worker how many cached tokens salts cost, and whether model servers obey salts.

It checks one prompt of SAMPLED, chosen by its first bytes, so that the same beginning is always or never checked. For such a prompt, it
remembers the beginnings of 1, 2, 4, ... KiB, each with the last two salts of its requests.

    lost      the longest beginning that another salt had, minus the longest that its own salt had: without salts, it could be cached
    ignored   the server reports a cached prompt with beginnings that came with another salt, but never with its own

`lost` is an upper bound, because a server may have dropped the beginning. A single `ignored` proves little: after a restart, the picker
does not know what servers have cached under the tenant's own salt. So no answer is counted as ignored in the first SETTLED_S of a worker.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from xxhash import xxh3_64_intdigest

from epp.data import Datum
from epp.decision.decision import Decision, Usage
from epp.metrics.request_series import SALT_IGNORED
from epp.prefix.divergence import APART
from epp.request import BYTES_PER_TOKEN, Request
from shm.series import SeriesWriter

SAMPLED: Final = 8
FIRST_BYTES: Final = 1024
LENGTHS: Final = tuple(FIRST_BYTES << n for n in range(11))
KEPT_MAX: Final = 16_384  # beginnings
SETTLED_S: Final = 600.0
FOREIGN: Final[Datum[bool]] = Datum("salt_watch_foreign", bool)


class SaltWatch:
    """Checks the requests of one worker. `checked`, `lost`: count tokens. `seed`: the 64-bit seed of prefix hashes."""

    def __init__(
        self,
        series: SeriesWriter,
        checked: Callable[[int], object],
        lost: Callable[[int], object],
        *,
        seed: int,
        now: float,
        kept_max: int = KEPT_MAX,
    ) -> None:
        """`series`: the writer of the group PREDICTION. `now`: monotonic seconds. `kept_max`: the limit of remembered beginnings."""
        self._series = series
        self._checked = checked
        self._lost = lost
        self._seed = seed
        self._settled_at = now + SETTLED_S
        self._kept_max = kept_max
        self._salts: OrderedDict[int, tuple[str, str]] = OrderedDict()  # hash of a beginning -> its last two salts

    def routed(self, request: Request) -> None:
        """Checks a request that still has its prompt."""
        salt, text = request.cache_salt, request.prompt.canonical
        if not salt or len(text) < FIRST_BYTES:
            return
        mark = xxh3_64_intdigest(text[:FIRST_BYTES], self._seed)
        if mark % SAMPLED:
            return
        own = other = 0
        for length in LENGTHS:
            if length > len(text):
                break
            if length > FIRST_BYTES:
                mark = xxh3_64_intdigest(memoryview(text)[:length], self._seed)
            last, before = self._salts.get(mark, ("", ""))
            if salt in (last, before):
                own = length
            if (last and last != salt) or (before and before != salt):
                other = length
            self._remember(mark, salt, before if last == salt else last)
        self._checked(len(text) // BYTES_PER_TOKEN)
        if other > own:
            self._lost((other - own) // BYTES_PER_TOKEN)
            if not own and request.arrived_at >= self._settled_at:
                request[FOREIGN] = True

    def answered(self, request: Request, decision: Decision, usage: Usage) -> None:
        """Counts an answer if its server had cached a prompt that only came with other salts."""
        if request[FOREIGN] and usage.prompt and (usage.cached or 0) > APART * usage.prompt:
            target = decision.targets[0]
            self._series.count(SALT_IGNORED.name, (target.name, target.namespace, str(target.port)))

    def _remember(self, mark: int, last: str, before: str) -> None:
        self._salts[mark] = last, before
        self._salts.move_to_end(mark)
        if len(self._salts) > self._kept_max:
            self._salts.popitem(last=False)
