"""The owner ids that endpoints had in the snapshot of the prefix index, until discovery finds these endpoints again."""

from collections.abc import Callable, Iterable, Mapping

from workers.shared.documents import Known
from workers.supervisor.endpoints import records
from workers.supervisor.endpoints.discovery import EndpointSpec


class Remembered:
    """Owner ids by endpoint. `owners`: those that no endpoint has taken yet."""

    def __init__(self, owners: Mapping[Known, int] | None = None, pool_name: Callable[[int], str] = lambda _number: "") -> None:
        """`pool_name` returns the present name of a pool by its number, "" for the only one."""
        self.owners = dict(owners or {})
        self._pool_name = pool_name

    def known(self, spec: EndpointSpec) -> Known:
        """Returns what identifies an endpoint over restarts of the picker."""
        return self._pool_name(spec.pool), records.identity_of(spec)

    def of(self, spec: EndpointSpec) -> int | None:
        """Returns the owner id of an endpoint; None if it has none, or has taken it."""
        return self.owners.get(self.known(spec)) if self.owners else None

    def taken(self, spec: EndpointSpec) -> None:
        """Notes that an endpoint has its id again."""
        del self.owners[self.known(spec)]

    def left(self, pool: int, pools: int, waiting: Iterable[EndpointSpec]) -> list[int]:
        """Returns the ids that no endpoint will take, once discovery of `pool` is complete: of this pool, and of pools that are gone.

        `pools`: how many there are. `waiting`: endpoints that wait for a slot.
        """
        if not self.owners:
            return []
        kept = {self.known(spec) for spec in waiting}
        others = {self._pool_name(number) for number in range(pools) if number != pool}
        return [self.owners.pop(known) for known in list(self.owners) if known[0] not in others and known not in kept]
